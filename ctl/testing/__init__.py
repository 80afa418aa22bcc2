"""Tests for a user's own trainer.

Each name is imported when it is first used (PEP 562), because pytest imports this module at its start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.testing.equivalence import (
        assert_loop_equivalent,
        assert_replica_equivalent,
        check_loop_equivalence,
        check_replica_equivalence,
    )
    from ctl.testing.equivalence_report import Report
    from ctl.testing.golden import CurveReport, assert_curve
    from ctl.testing.logical_devices import copies, make_strategy, split_cpu
    from ctl.testing.multiprocess import run_workers
    from ctl.testing.non_finite import plant
    from ctl.testing.subjects.loop import Loop
    from ctl.testing.tiny import TinyTrainer, tiny_trainer

_NAMES = {
    "logical_devices": ("copies", "make_strategy", "split_cpu"),
    "equivalence": (
        *("assert_loop_equivalent", "assert_replica_equivalent"),
        *("check_loop_equivalence", "check_replica_equivalence"),
    ),
    "golden": ("CurveReport", "assert_curve"),
    "multiprocess": ("run_workers",),
    "non_finite": ("plant",),
    "equivalence_report": ("Report",),
    "subjects.loop": ("Loop",),
    "tiny": ("TinyTrainer", "tiny_trainer"),
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
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
