"""Many steps of workers that update by themselves, as a coordinator schedules them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

CHUNK = 10  # steps that a worker is given at once; of a lost one so many may be done again


def is_coordinated(strategy: tf.distribute.Strategy) -> bool:
    """Whether workers step by themselves, as a coordinator tells them to."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


class CoordinatedLoop:
    """Runs any number of steps on the workers of a parameter-server strategy; an inner loop for Orbit.

        loop = CoordinatedLoop(trainer.train_step, strategy=strategy)
        loop(iter(per_worker_dataset), tf.constant(250))      # 25 chunks, shared out; waits for all

    A worker that is lost is left out, and its chunk given to another.
    """

    def __init__(self, train_step: Callable[[Any], None], *, strategy: tf.distribute.Strategy):
        """Schedules nothing yet.

        Args:
            train_step: one step of a worker, counted, that takes its iterator.
            strategy: with parameter servers.
        """
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        def steps(iterator: Any, count: tf.Tensor) -> None:
            for _ in tf.range(count):
                train_step(iterator)

        self._steps = tf.function(steps)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> None:
        """Runs `num_steps` steps, and waits until they are done.

        Args:
            iterator: of a per-worker dataset.
            num_steps: how many steps, of all workers together.
        """
        left = int(num_steps)
        while left:
            count = min(left, CHUNK)
            self._coordinator.schedule(self._steps, args=(iterator, tf.constant(count)))
            left -= count
        self._coordinator.join()
