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
from typing import Any

_NAMES = {
    "damage": ("delete", "flip", "leave_unfinished", "truncate"),
    "kills": ("killing",),
    "poison": ("example_on", "poisoned", "poisoned_step"),
    "signals": ("delay", "drop", "workers"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
