"""The process that `ctl.modes.step_time` starts.

python -m ctl.modes.step_process < REQUEST

The request is a pickled config and its path; the answer is one line of JSON.
"""

import json
import pickle
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.configs import error_location, overrides
from ctl.errors import UsageError
from ctl.modes import experiment, profile_input, step_time


def answer(config: Any, config_path: str) -> dict[str, Any]:
    """Returns the `seconds` of a step alone and the `difference` from xla=off, or the `error`."""
    hardware = experiment.build_hardware(config.runtime)

    def train(xla: str) -> tuple[Any, np.ndarray, np.ndarray]:
        own = overrides.with_values(config, {"runtime.xla": xla})
        trainer = experiment.build(own, config_path, evaluates=False, hardware=hardware).trainer
        read = lambda: np.concatenate([np.ravel(w) for w in trainer.model.get_weights()])  # noqa: E731
        before = read().astype(np.float64)
        trainer.train(tf.constant(step_time.STEPS))
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
