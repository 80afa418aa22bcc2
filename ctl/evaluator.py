"""StandardEvaluator: every example of the evaluation data, counted exactly once."""

from collections.abc import Callable
import contextlib
from typing import Any

import orbit
import tensorflow as tf

from ctl.data.source import Batch
from ctl.data.tfrecords import describe_corruption
from ctl.errors import UsageError
from ctl.hardware import coordinator
from ctl.replica import loss, precision
from ctl.replica.step import row_count
from ctl.trainer import StandardTrainer, unpack

STEPS_BETWEEN_LOOKS = 20  # steps after which an evaluation asks whether to stop


class Interrupted(Exception):
    """An evaluation was asked to stop before its end."""


class StandardEvaluator(orbit.StandardEvaluator):
    """Evaluates a trainer's model on its `build_dataset("eval", ...)`.

        evaluator = ctl.StandardEvaluator(trainer)
        evaluator.evaluate(tf.constant(-1))    # {"loss": ..., "accuracy": ..., "examples": 10000}

    The loss is the weighted mean over the whole dataset of `per_example_loss`, without regularization,
    however the dataset divides into batches and replicas.

    Attributes:
        any_process_stops: called every few batches, in every process: whether to raise `Interrupted`.
    """

    def __init__(self, trainer: StandardTrainer, *, global_batch_size: int | None = None):
        """Takes model, loss, metrics and data from a trainer.

        Args:
            trainer: what to evaluate.
            global_batch_size: examples a step, over all replicas; by default the trainer's.
        """
        super().__init__(eval_dataset=None)
        self._eval_dataset: Any = None
        self.any_process_stops: Callable[[], bool] = lambda: False
        self._own_dataset = False
        self.trainer = trainer
        self.strategy = trainer.strategy
        self.global_batch_size = global_batch_size or trainer.global_batch_size
        with trainer.building(), self.strategy.scope():
            self.metrics = trainer.build_metrics()
            self._loss_sum = self._accumulator("loss_sum", tf.float64)
            self._weight_sum = self._accumulator("weight_sum", tf.float64)
            self._examples = self._accumulator("examples", tf.int64)

    @property
    def eval_dataset(self) -> Any:
        """The distributed evaluation data; set it to feed batches of your own making."""
        if self._eval_dataset is None:
            self._eval_dataset = self.trainer.feed.evaluation_dataset(self.global_batch_size)
        return self._eval_dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        self._eval_dataset = dataset
        self._own_dataset = True

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, Any]:
        """Evaluates `num_steps` batches; -1 for the whole dataset."""
        if int(num_steps) == -1 and not self._own_dataset:
            steps = self.trainer.feed.evaluation_steps(self.global_batch_size)
            num_steps = num_steps if steps is None else tf.constant(steps)
        try:
            return super().evaluate(num_steps)
        except tf.errors.DataLossError as error:
            raise UsageError(
                f"The evaluation data is corrupt ({describe_corruption(error)}): write the file again."
            ) from None

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """The loop over the batches: Orbit's, a few at a time, so that it can be stopped."""
        run = super().create_eval_loop_fn(has_state)
        if coordinator.is_coordinated(self.strategy):
            run = self._plain_loop()

        def loop(iterator: Any, num_steps: tf.Tensor, **state: Any) -> Any:
            left = int(num_steps)
            if left < 0 or has_state:  # the data's end will tell, or a person's own reduction
                return run(iterator, num_steps, **state)
            while left:
                count = min(left, STEPS_BETWEEN_LOOKS)
                run(iterator, tf.constant(count), **state)
                left -= count
                if left and self.any_process_stops():
                    raise Interrupted
            return None

        return loop

    def _plain_loop(self) -> Any:
        """Not in an `async_scope`, as Orbit's: leaving it waits for workers that are lost."""
        step = tf.function(self.eval_step)

        def loop(iterator: Any, num_steps: tf.Tensor, **_: Any) -> None:
            done, asked = 0, int(num_steps)
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while done != asked:
                    step(iterator)
                    done += 1

        return loop

    def eval_begin(self) -> None:
        """Resets the counts and metrics."""
        for variable in (self._loss_sum, self._weight_sum, self._examples):
            variable.assign(tf.zeros_like(variable))
        for metric in self.metrics.values():
            metric.reset_state()

    def eval_step(self, iterator: Any) -> None:
        """One step of every replica; Orbit's hook."""
        batch, present = unpack(next(iterator))
        if coordinator.is_coordinated(self.strategy):  # the coordinator evaluates by itself
            self._replica_eval_step(batch, present)
        else:
            self.strategy.run(self._replica_eval_step, args=(batch, present))

    def eval_end(self) -> dict[str, Any]:
        """Returns the loss, the metrics, and how many examples they are of."""
        if int(self._examples.numpy()) == 0:
            raise UsageError("The evaluation dataset is empty: want at least one example.")
        results = {name: metric.result() for name, metric in self.metrics.items()}
        mean = tf.math.divide_no_nan(self._loss_sum.read_value(), self._weight_sum.read_value())
        return {"loss": mean, **results, "examples": self._examples.read_value()}

    def _replica_eval_step(self, batch: Batch, present: tf.Tensor | None) -> None:
        trainer = self.trainer
        with trainer.rows(batch, present):
            batch = trainer.preprocess(batch)
            outputs = precision.cast_to_float32(trainer.forward(batch, training=False))
            per_example = tf.cast(trainer.per_example_loss(batch, outputs), tf.float64)
            weights = loss.row_weights(trainer.sample_weight(batch), present, tf.float64)
            trainer.update_metrics(self.metrics, batch, outputs, present)
        rows = tf.cast(row_count(batch), tf.int64)
        ones = tf.cast(rows, tf.float64)
        self._loss_sum.assign_add(loss.share(per_example, weights, tf.ones([], tf.float64)))
        self._weight_sum.assign_add(ones if weights is None else tf.reduce_sum(weights))
        there = rows if present is None else tf.cast(tf.reduce_sum(present), tf.int64)
        self._examples.assign_add(there)

    def _accumulator(self, name: str, dtype: tf.DType) -> tf.Variable:
        return tf.Variable(
            tf.zeros([], dtype),
            trainable=False,
            name=name,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
