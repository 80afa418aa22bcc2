"""Times the step in one mode of `runtime.xla` in a process of its own, with a time limit.

The process gets the pickled config and its path, and answers by a line of JSON.

The developers of ctl have not run complete steps of several GPUs. One that waits for ever must not stop
the comparison of the modes, and one that computes something else must not be advised.
"""

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.configs import error_location, overrides
from ctl.errors import UsageError
from ctl.modes import experiment

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
            [sys.executable, "-m", __name__],
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


def answer(config: Any, config_path: str) -> dict[str, Any]:
    """Returns the `seconds` of a step alone and the `difference` from xla=off, or the `error`."""
    from ctl.modes import profile_input  # which imports this module

    hardware = experiment.build_hardware(config.runtime)

    def train(xla: str) -> tuple[Any, np.ndarray, np.ndarray]:
        own = overrides.with_values(config, {"runtime.xla": xla})
        trainer = experiment.build(own, config_path, evaluates=False, hardware=hardware).trainer
        read = lambda: np.concatenate([np.ravel(w) for w in trainer.model.get_weights()])  # noqa: E731
        before = read().astype(np.float64)
        trainer.train(tf.constant(STEPS))
        return trainer, before, read().astype(np.float64)

    try:
        _, before, expected = train("off")
        trainer, _, found = train(config.runtime.xla)
        change = float(np.linalg.norm(expected - before))
        return {
            "difference": float(np.linalg.norm(found - expected) / max(change, 1e-12)),
            "seconds": profile_input.time_step(trainer, config.train.steps_per_loop),
        }
    except (UsageError, tf.errors.OpError) as error:
        return {"error": error_location.describe(error)}


if __name__ == "__main__":
    print(json.dumps(answer(*pickle.load(sys.stdin.buffer))), flush=True)
