"""Times the step in one mode of `runtime.xla` in a process of its own, with a time limit.

The developers of ctl have not run complete steps of several GPUs. One that waits for ever must not stop
the comparison of the modes, and one that computes something else must not be advised.
"""

import json
import os
import pickle
import subprocess
import sys
from typing import Any

from ctl.errors import UsageError

SECONDS = 300.0
STEPS = 3
# The largest difference from xla=off, relative to the change.
_BOUND = {"float64": 1e-6, "float32": 1e-2}
_BOUND_OF_16_BITS = 0.3


def measure(config: Any, config_path: str, *, seconds: float = SECONDS) -> float:
    """Returns the seconds of a step alone.

    Args:
        config: a validated config, whose mode is the one to measure.
        config_path: the config file.
        seconds: the time limit.

    Raises:
        UsageError: the mode does not work here; the message says why.
    """
    # TensorFlow's own output goes to stderr. The process uses the memory that it needs, and no more.
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ctl.modes.step_process"],
            input=pickle.dumps((config, config_path)),
            capture_output=True,
            env={**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"it did not end within {seconds:g} s") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"its process ended with exit code {done.returncode}: {' '.join(last)}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise UsageError(answer["error"])
    bound = _BOUND.get(config.runtime.precision, _BOUND_OF_16_BITS)
    if not answer["difference"] <= bound:
        raise UsageError(
            f"after {STEPS} steps its weights differ from those of runtime.xla=off by "
            f"{answer['difference']:.1e} of their change"
        )
    return float(answer["seconds"])
