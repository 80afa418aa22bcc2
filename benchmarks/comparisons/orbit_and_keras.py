"""Orbit and tf_keras `fit` on small cases, next to what a user expects.

    python -m benchmarks.comparisons.orbit_and_keras

`python -m benchmarks.uneven_split` has the updates of batches that are split unevenly.
"""

import contextlib
import io
import math
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.loop.controller import next_boundary
from ctl.loop.timing import Every


def orbit_intervals() -> tuple[list[int], list[int]]:
    """The steps of Orbit's checkpoints and evaluations: intervals of 4 and 6, loops of 5, 20 steps."""

    class Trainer(orbit.StandardTrainer):
        def __init__(self):
            self.step = tf.Variable(0, dtype=tf.int64)
            super().__init__(tf.data.Dataset.range(1).repeat())

        def train_step(self, iterator):
            next(iterator)
            self.step.assign_add(1)

    class Evaluator(orbit.AbstractEvaluator):
        def evaluate(self, num_steps):
            evaluated.append(int(trainer.step))
            return {}

    trainer, evaluated, saved = Trainer(), [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(step=trainer.step)
        manager = tf.train.CheckpointManager(
            checkpoint, folder, max_to_keep=None, step_counter=trainer.step, checkpoint_interval=4
        )
        controller = orbit.Controller(
            trainer=trainer, evaluator=Evaluator(), global_step=trainer.step, steps_per_loop=5,
            checkpoint_manager=manager,
        )  # fmt: skip
        controller.train_and_evaluate(train_steps=20, eval_steps=1, eval_interval=6)
        saved = [int(path.rpartition("-")[2]) for path in manager.checkpoints]
    return saved, evaluated


def expected_boundaries(interval: int) -> list[int]:
    """The multiples of an interval up to step 20, and the last step."""
    steps = [0]
    while steps[-1] < 20:
        steps.append(next_boundary(steps[-1], 20, Every(interval)))
    return steps[1:]


def orbit_best_after_nan() -> list[bool]:
    """Whether Orbit's NewBestMetric takes each of the accuracies NaN, 0.5, 0.9 as the best one."""
    best = orbit.actions.NewBestMetric("accuracy")
    return [bool(best({"accuracy": np.float32(value)})) for value in (math.nan, 0.5, 0.9)]


def keras_patience_after_restart() -> tuple[int, int]:
    """Epochs until tf_keras' EarlyStopping(patience=3) ends a run that cannot improve.

    Returns:
        Undisturbed; and if the run is stopped after every second epoch and resumed by `initial_epoch`
        with the same callback, up to epoch 20.
    """

    def train(segments: list[tuple[int, int]]) -> int:
        inputs = tf_keras.Input([1])
        model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(inputs))
        model.compile(tf_keras.optimizers.SGD(0.0), "mse")
        stopping = tf_keras.callbacks.EarlyStopping("loss", patience=3)
        epochs = 0
        for first, end in segments:
            options = {"epochs": end, "initial_epoch": first, "callbacks": [stopping]}
            ones = np.ones([4, 1])
            epochs += len(model.fit(ones, ones, verbose=0, **options).epoch)
        return epochs

    return train([(0, 20)]), train([(epoch, epoch + 2) for epoch in range(0, 20, 2)])


def main() -> None:
    """Prints one row per case."""
    tf.get_logger().setLevel("ERROR")
    with contextlib.redirect_stdout(io.StringIO()):  # Orbit's own lines
        saved, evaluated = orbit_intervals()
    undisturbed, restarted = keras_patience_after_restart()
    print(f"tensorflow {tf.__version__}, tf_keras {tf_keras.__version__}")
    for what, interval, steps in (("checkpoints", 4, saved), ("evaluations", 6, evaluated)):
        expected = expected_boundaries(interval)
        print(f"{what} every {interval} steps, loops of 5: expected {expected}, orbit {steps}")
    best = orbit_best_after_nan()
    print(f"accuracies NaN, 0.5, 0.9 are a new best: expected [False, True, True], orbit {best}")
    print(f"epochs until early stopping with patience 3: keras fit {undisturbed}, ", end="")
    print(f"resumed every 2 epochs {restarted}")


if __name__ == "__main__":
    main()
