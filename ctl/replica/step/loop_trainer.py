"""The updates and the inner loop of a trainer, on top of Orbit's `StandardTrainer`."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from typing import Any

import orbit
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert
from ctl.data.source import Batch
from ctl.hardware import coordinator
from ctl.replica.arithmetic import precision
from ctl.replica.measure.non_finite import NonFiniteReport
from ctl.replica.step import xla
from ctl.replica.step.engine import Engine
from ctl.replica.step.microbatches import unpack
from ctl.replica.step.model_building import build_scope, check_optimizer
from ctl.replica.step.trainer_attributes import check_known
from ctl.replica.updates import parameter_groups


class LoopTrainer(orbit.StandardTrainer):
    """Runs the steps and the loops of a `StandardTrainer`; a subclass seldom overrides it."""

    strategy: tf.distribute.Strategy
    options: TrainerOptions
    model: tf_keras.Model
    optimizer: Any
    global_step: tf.Variable
    sample_weight: Callable[[Batch], tf.Tensor | None]
    regularization_losses: Callable[[], Sequence[tf.Tensor]]
    non_finite_report: NonFiniteReport | None
    _ctl_engine: Engine
    _train_loop_fn: Any  # of Orbit's class, which has no type hints
    _train_iter: Any

    def minimize(
        self,
        batch: Batch,
        loss_fn: Callable[[Batch], tf.Tensor],
        *,
        variables: Sequence[tf.Variable] | None = None,
        optimizer: Any = None,
        regularization: Callable[[], Sequence[tf.Tensor]] | None = None,
    ) -> tf.Tensor:
        """Computes and applies the one update that the global batch defines.

        Call it in `replica_step`, on every replica.

        Args:
            batch: this replica's rows, preprocessed.
            loss_fn: micro-batch -> [rows] losses, not reduced, as for `per_example_loss`.
            variables: the variables to train; the model's trainable variables by default.
            optimizer: the trainer's by default. Under float16 it must be a LossScaleOptimizer.
            regularization: returns scalars to add once. By default, the penalties of the layers that
                hold `variables`, of any model; `regularization_losses` if it is overridden, or if
                `variables` is None.

        Returns:
            The loss of the global batch, the same on every replica.
        """
        engine, optimizer = self._ctl_engine, check_optimizer(optimizer or self.optimizer)
        is_own = engine.attributes.overrides("regularization_losses")
        if regularization is None and variables is not None and not is_own:
            regularization = functools.partial(engine.attributes.penalties, variables)
        variables = self.model.trainable_variables if variables is None else variables
        check_known(optimizer, variables)
        # This also covers an optimizer that the trainer does not hold as an attribute.
        models = engine.attributes.named_models()
        parameter_groups.configure(optimizer, models, self.options)
        return engine.step(
            batch,
            lambda rows, _: convert(loss_fn)(rows),
            forward=None,
            sample_weight=convert(self.sample_weight)(batch),
            variables=variables,
            optimizer=optimizer,
            regularization=regularization or self.regularization_losses,
        ).loss

    def train_step(self, iterator: Any) -> None:
        """Runs one step on every replica; `iterator` yields batches, or `(batch, row_mask)`."""
        engine = self._ctl_engine
        batch, row_mask = unpack(engine.results.input_wait.next(iterator))
        step = engine.replica_train_step
        if engine.plan.xla == "step":
            step = xla.jit(step)
        loss = self.strategy.run(step, args=(batch, row_mask))
        # A step that fails is not counted.
        with tf.control_dependencies(list(self.strategy.experimental_local_results(loss))):
            self.global_step.assign_add(1)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any] | None:
        """Trains `num_steps` (scalar int32) steps and returns what `train_loop_end` returns.

        Raises:
            UsageError: the data is corrupt or has ended, or a step does not fit into memory.
            NonFiniteStep: a step was not finite, and the options do not say to skip it.
        """
        engine = self._ctl_engine
        engine.prepare_loop()
        waiting = engine.results.reduction_wait.active()
        with engine.report_errors(), engine.trace_scope(), waiting:
            # As in Orbit's own `train`, except that the user may freeze layers in `train_loop_begin`.
            self.train_loop_begin()
            for steps in _split(engine, int(self.global_step.numpy()), int(num_steps)):
                engine.retrace_if_changed()
                if self._train_loop_fn is None:
                    self._train_loop_fn = self.create_train_loop_fn()
                if self._train_iter is None:
                    self._train_iter = tf.nest.map_structure(iter, self.train_dataset)
                self._train_loop_fn(self._train_iter, tf.constant(steps))
            outputs = self.train_loop_end()
        self.non_finite_report = engine.finish_loop()
        return outputs

    def train_loop_begin(self) -> None:
        """Resets the loss and the metrics of the loop."""
        self._ctl_engine.results.reset()

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the mean loss, the metrics, and the other results that the options ask for."""
        return self._ctl_engine.results.read()

    def create_train_loop_fn(self) -> Any:
        """Returns the inner loop: Orbit's, one XLA program, or the one of a coordinator."""
        if coordinator.is_coordinated(self.strategy):
            return coordinator.CoordinatedLoop(
                super().create_train_loop_fn(), strategy=self.strategy
            )
        return self._ctl_engine.compiled_loop or super().create_train_loop_fn()

    @property
    def train_dataset(self) -> Any:
        """The distributed training data; set it to train on batches of your own."""
        return self._train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self._ctl_engine.use_own_dataset()
        self._train_dataset, self._train_iter = dataset, None

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns the items of a checkpoint: every model, optimizer and variable, even in lists."""
        return self._ctl_engine.checkpoint_items()

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the averaged weights within a `with` block, to evaluate or export them.

        Without `ema_decay` it has no effect. The evaluator uses it by itself.
        """
        return self._ctl_engine.averaged_weights()

    def build_scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns the strategy's scope with the options' seed and precision, to build more models."""
        return build_scope(self.options, self.strategy)

    @property
    def compute_dtype(self) -> tf.DType:
        """The dtype that layers compute in."""
        return tf.as_dtype(precision.of(self.options.precision).compute)

    @property
    def variable_dtype(self) -> tf.DType:
        """The dtype of the variables."""
        return tf.as_dtype(precision.of(self.options.precision).floatx)


def _split(engine: Engine, first: int, count: int) -> Iterator[int]:
    """Splits a range of steps where layers are unfrozen, or gradients begin to be compressed.

    Yields:
        The number of steps of each part, once the trainer is prepared for it.
    """
    compression = engine.step.compression
    for steps in compression.split(first, count) if compression else (count,):
        yield from engine.attributes.unfreezing.split(first, steps)
        first += steps
