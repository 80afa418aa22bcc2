"""Fault injection: kills at exact points, damaged checkpoints, NaN in a batch, slow or lost workers.

    from ctl.testing import faults

    with faults.killing("save:2"):                          # during this process' second save
        ctl.main.run(["ctl", "--config=experiments/mnist.py"])
    faults.truncate("runs/mnist/checkpoints", 938)          # as after an interrupted copy
    faults.delay(launcher.pid, "worker 1", seconds=10)      # pauses the process

`python -m ctl.testing.faults --kill=step:33 -- --config=...` runs the complete program with a kill.
Each name is imported when it is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.testing.faults.damage import delete, flip, leave_unfinished, truncate
    from ctl.testing.faults.kills import killing
    from ctl.testing.faults.poison import example_on, poisoned, poisoned_step
    from ctl.testing.faults.processes import delay, drop, workers

_MODULES = {
    "delete": "damage",
    "flip": "damage",
    "leave_unfinished": "damage",
    "truncate": "damage",
    "killing": "kills",
    "example_on": "poison",
    "poisoned": "poison",
    "poisoned_step": "poison",
    "delay": "processes",
    "drop": "processes",
    "workers": "processes",
}
__all__ = [
    "delay",
    "delete",
    "drop",
    "example_on",
    "flip",
    "killing",
    "leave_unfinished",
    "poisoned",
    "poisoned_step",
    "truncate",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
