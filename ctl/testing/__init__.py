"""Tests for a user's own trainer; pytest imports this module at its start."""

from typing import TYPE_CHECKING

from ctl import lazy

if TYPE_CHECKING:
    from ctl.testing.equivalence import assert_loop_equivalent as assert_loop_equivalent
    from ctl.testing.equivalence import assert_replica_equivalent as assert_replica_equivalent
    from ctl.testing.equivalence import check_loop_equivalence as check_loop_equivalence
    from ctl.testing.equivalence import check_replica_equivalence as check_replica_equivalence
    from ctl.testing.equivalence_report import Report as Report
    from ctl.testing.golden import assert_curve as assert_curve
    from ctl.testing.logical_devices import copies as copies
    from ctl.testing.logical_devices import make_strategy as make_strategy
    from ctl.testing.logical_devices import split_cpu as split_cpu
    from ctl.testing.multiprocess import run_workers as run_workers
    from ctl.testing.non_finite import plant as plant
    from ctl.testing.subjects.loop import Loop as Loop
    from ctl.testing.tiny import TinyTrainer as TinyTrainer
    from ctl.testing.tiny import tiny_trainer as tiny_trainer

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "equivalence": "assert_loop_equivalent assert_replica_equivalent check_loop_equivalence "
        "check_replica_equivalence",
        "equivalence_report": "Report",
        "golden": "assert_curve",
        "logical_devices": "copies make_strategy split_cpu",
        "multiprocess": "run_workers",
        "non_finite": "plant",
        "subjects.loop": "Loop",
        "tiny": "TinyTrainer tiny_trainer",
    },
)
