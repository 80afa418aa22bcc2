"""What a person's own tests need to prove their trainer right.

Importing this loads no TensorFlow, since pytest imports it when it starts: each name is loaded when
it is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.testing.devices import make_strategy, split_cpu
    from ctl.testing.equivalence import assert_replica_equivalent, check_replica_equivalence
    from ctl.testing.overflow import copies, plant
    from ctl.testing.processes import run_workers
    from ctl.testing.report import Report
    from ctl.testing.tiny import TinyTrainer, tiny_trainer

_MODULES = {
    "Report": "ctl.testing.report",
    "assert_replica_equivalent": "ctl.testing.equivalence",
    "check_replica_equivalence": "ctl.testing.equivalence",
    "copies": "ctl.testing.overflow",
    "make_strategy": "ctl.testing.devices",
    "plant": "ctl.testing.overflow",
    "run_workers": "ctl.testing.processes",
    "split_cpu": "ctl.testing.devices",
    "TinyTrainer": "ctl.testing.tiny",
    "tiny_trainer": "ctl.testing.tiny",
}
__all__ = [
    "Report",
    "TinyTrainer",
    "assert_replica_equivalent",
    "check_replica_equivalence",
    "copies",
    "make_strategy",
    "plant",
    "run_workers",
    "split_cpu",
    "tiny_trainer",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ctl.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
