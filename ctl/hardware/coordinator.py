"""Schedules the steps of a parameter-server strategy on its workers."""

from typing import Any

import tensorflow as tf

# Steps per scheduled function: enough to hide the cost of a remote call. When a worker is lost, up to
# this number of its steps run a second time on another worker.
STEPS_PER_CALL = 10


class CoordinatedLoop:
    """An inner loop for Orbit that runs its steps on the workers of a parameter-server strategy.

        loop = CoordinatedLoop(run_steps, strategy=strategy)
        loop(iter(per_worker_dataset), tf.constant(250))  # 25 calls, divided among the workers

    If a worker is lost, `ClusterCoordinator` runs its call on another one.

    Args:
        run_steps: a `tf.function` (iterator, number of steps) that runs steps of one worker, each of
            which increments the step count.
        strategy: the parameter-server strategy.
    """

    def __init__(self, run_steps: Any, *, strategy: tf.distribute.Strategy):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._run_steps = run_steps

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> None:
        """Runs `num_steps` steps, and returns when all workers have completed theirs.

        Args:
            iterator: an iterator of a per-worker dataset.
            num_steps: int scalar, the number of steps of all workers together.
        """
        remaining = int(num_steps)
        while remaining:
            count = min(remaining, STEPS_PER_CALL)
            # As a tensor: a Python integer would retrace the function for the last, shorter call.
            self._coordinator.schedule(self._run_steps, args=(iterator, tf.constant(count)))
            remaining -= count
        self._coordinator.join()
