"""Tests for a user's own trainer.

Each name is imported when it is first used (PEP 562), because pytest imports this module at its start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.testing.devices import copies, make_strategy, split_cpu
    from ctl.testing.equivalence import (
        assert_loop_equivalent,
        assert_replica_equivalent,
        check_loop_equivalence,
        check_replica_equivalence,
    )
    from ctl.testing.faults.poison import plant
    from ctl.testing.golden.assertion import assert_curve
    from ctl.testing.golden.comparison import CurveReport
    from ctl.testing.processes import run_workers
    from ctl.testing.report import Report
    from ctl.testing.subjects.adapters import Loop
    from ctl.testing.tiny import TinyTrainer, tiny_trainer

_MODULES = {
    "CurveReport": "golden.comparison",
    "Loop": "subjects.adapters",
    "Report": "report",
    "TinyTrainer": "tiny",
    "assert_curve": "golden.assertion",
    "assert_loop_equivalent": "equivalence",
    "assert_replica_equivalent": "equivalence",
    "check_loop_equivalence": "equivalence",
    "check_replica_equivalence": "equivalence",
    "copies": "devices",
    "make_strategy": "devices",
    "plant": "faults.poison",
    "run_workers": "processes",
    "split_cpu": "devices",
    "tiny_trainer": "tiny",
}
__all__ = [
    "CurveReport",
    "Loop",
    "Report",
    "TinyTrainer",
    "assert_curve",
    "assert_loop_equivalent",
    "assert_replica_equivalent",
    "check_loop_equivalence",
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
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
