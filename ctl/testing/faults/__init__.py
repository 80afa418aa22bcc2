"""Fault injection: kills at exact points, a NaN on one replica, lost workers.

    from ctl.testing import faults

    with faults.killing("save:2"):                          # during this process' second save
        ctl.main.run(["ctl", "--config=experiments/mnist.py"])
    faults.drop(launcher.pid, "worker 1")                   # kills the process

`python -m ctl.testing.faults --kill=step:33 -- --config=...` runs the complete program with a kill.
Each name is imported when it is first used (PEP 562).
"""

import importlib
from typing import Any

_NAMES = {
    "kills": ("killing",),
    "plant": ("plant",),
    "processes": ("drop", "workers"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
