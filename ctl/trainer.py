"""StandardTrainer: a person's step, and around it everything that must be right on every replica."""

import abc
from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import orbit
import tensorflow as tf
import tf_keras

from ctl.configs import compatibility
from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import Batch
from ctl.data.tfrecords import describe_corruption
from ctl.errors import NonFiniteStep, UsageError
from ctl.hardware import coordinator, devices, strategies
from ctl.hardware.coordinator import CoordinatedLoop
from ctl.hooks import Hooks
from ctl.replica import dropout as replica_random
from ctl.replica import model_building, out_of_memory, precision
from ctl.replica import row_mask as replica_rows
from ctl.replica import xla as replica_compile
from ctl.replica.inner_loop import CompiledLoop, chunk_size
from ctl.replica.non_finite import NonFiniteReport
from ctl.replica.step import Losses, Result, row_count
from ctl.replica.update import Update, counter

Optimizer = Any  # a tf_keras optimizer; the package has no types


class StandardTrainer(Hooks, orbit.StandardTrainer, metaclass=abc.ABCMeta):
    """A training loop around a step of your own, whose update the global batch alone defines.

        class Digits(ctl.StandardTrainer):
            def build_model(self):
                return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(10)])

            def build_dataset(self, split, input_context):
                return ctl.data.idx("experiments/data/mnist", split)

            def per_example_loss(self, batch, outputs):
                return tf_keras.losses.sparse_categorical_crossentropy(
                    batch["label"], outputs, from_logits=True)

        trainer = Digits(global_batch_size=64, optimizer=lambda: tf_keras.optimizers.Adam(1e-3))
        controller = orbit.Controller(
            trainer=trainer, global_step=trainer.global_step, steps_per_loop=100)
        controller.train(steps=1000)

    Override, from small to large: `preprocess`, `forward`, `per_example_loss`, `sample_weight`,
    `regularization_losses`, `build_metrics`, `update_metrics`, `replica_step`, `train_step`. A batch
    is a dict of tensors of shape [rows, ...].

    Attributes:
        strategy: the `tf.distribute.Strategy`.
        global_batch_size: examples an update is computed from, over all replicas and micro-batches.
        options: the frozen `TrainerOptions`.
        model: what `build_model` returned.
        optimizer: a tf_keras optimizer; its `iterations` counts updates applied.
        global_step: int64 variable: batches consumed, which is the position in the data.
        metrics: name -> metric, of the training loop.
        non_finite: what was not finite in the last loop, or None.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        optimizer: Optimizer | Callable[[], Optimizer],
        strategy: tf.distribute.Strategy | None = None,
        options: TrainerOptions | None = None,
    ):
        """Builds the model, the optimizer and the training data.

        Args:
            global_batch_size: examples an update is computed from, over all replicas.
            optimizer: makes the optimizer, under the strategy's scope; or one made there.
            strategy: where the replicas are; the current strategy if not given.
            options: everything else.

        Raises:
            UsageError: an option cannot be right with this model, data or strategy.
        """
        super().__init__(train_dataset=None)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.global_batch_size = global_batch_size
        self.options = options or TrainerOptions()
        self.feed = InputPipeline(
            self.build_dataset,
            strategy=self.strategy,
            seed=self.options.seed,
            prefetch=self.options.prefetch,
            build_scope=self.building,
        )
        self.layout = self.feed.layout(global_batch_size)
        self._check_spikes()
        # Before tf_keras meets it; the options that need the model are checked with it, in Update.
        row = strategies.strategy_name(self.strategy)
        compatibility.check(compatibility.Choice(precision=self.options.precision, strategy=row))
        self._position: int | None = None
        self._own_dataset = False
        self.non_finite: NonFiniteReport | None = None
        self._keyed: set[str] = set()
        with self.building(), self.strategy.scope():
            self.model = model_building.apply_sync_batch_norm(
                self.build_model(), self.options.model
            )
            self.optimizer: Any = precision.wrap_loss_scale(
                model_building.make_optimizer(optimizer),
                self.options.precision,
                self.options.loss_scale,
            )
            self.metrics: dict[str, tf_keras.metrics.Metric] = self.build_metrics()
            self._loss = tf_keras.metrics.Mean("loss", dtype=self.variable_dtype)
            self.global_step = counter("global_step")
            model_building.create_variables(self._outputs, self.feed.element_spec())
            self.optimizer.build(self.model.trainable_variables)
            full = self.feed.has_full_batches(global_batch_size)
            self.update = Update(
                self.options,
                model=self.model,
                layout=self.layout,
                full=full,
                chunks=self.feed.supports_chunks() and not self._own_train_step(),
                strings=any(
                    s.dtype == tf.string for s in tf.nest.flatten(self.feed.element_spec())
                ),
            )
            self.skipped_steps, self.spikes = self.update.skipped_steps, self.update.spikes
        replica_random.key_random_layers(self.model, self.options.seed)
        self._compiled = self._compile_loop() if self.update.xla == "loop" else None
        model_building.check_model(
            self.model,
            self.layout,
            parts=self.options.logical_shards or self.options.gradient_accumulation_steps,
            full=full,
        )

    def replica_step(self, batch: Batch) -> tf.Tensor:
        """One replica's whole step; `minimize` once, by default. Override it for a GAN.

        Args:
            batch: this replica's rows, preprocessed.

        Returns:
            The loss of the global batch, a scalar, the same on every replica.
        """
        result = self._update(batch, self._example_losses)
        for part, present, outputs in result.parts:
            self.update_metrics(self.metrics, part, outputs, present)
        return result.loss

    def minimize(
        self,
        batch: Batch,
        losses: Callable[[Batch], tf.Tensor],
        *,
        variables: Sequence[tf.Variable] | None = None,
        optimizer: Optimizer | None = None,
        regularization: Callable[[], Sequence[tf.Tensor]] | None = None,
    ) -> tf.Tensor:
        """Applies the one update that the global batch defines.

        Call it in `replica_step`: a micro-batch at a time it computes this replica's share of the
        loss and its gradients, sums them over the replicas, clips, and applies.

        Args:
            batch: this replica's rows, preprocessed.
            losses: a micro-batch -> [rows] losses, not reduced.
            variables: what to train; by default the model's trainable variables.
            optimizer: by default the trainer's; under float16 give it in a LossScaleOptimizer.
            regularization: gives the scalars to add once; by default `regularization_losses`.

        Returns:
            The loss of the global batch, the same on every replica.
        """
        return self._update(
            batch,
            lambda rows: (losses(rows), None),
            variables=variables,
            optimizer=optimizer,
            regularization=regularization,
        ).loss

    def train_step(self, iterator: Any) -> None:
        """One step of every replica; Orbit's hook.

        Args:
            iterator: of `(batch, present)`, or of batches.
        """
        batch, present = unpack(next(iterator))
        step = self._replica_train_step
        if self.update.xla == "step":
            step = replica_compile.jit(step)
        value = self.strategy.run(step, args=(batch, present))
        # A step that fails is not counted.
        with tf.control_dependencies(list(self.strategy.experimental_local_results(value))):
            self.global_step.assign_add(1)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any] | None:
        """Trains `num_steps` steps from where `global_step` stands in the data."""
        self._key_other_models()
        step = int(self.global_step.numpy())
        if not self._own_dataset and self._position != step:
            self._train_dataset, self._train_iter = self._training_from(step), None
        self._position = None  # until the loop has ended well
        try:
            output = super().train(num_steps)
        except tf.errors.DataLossError as error:
            raise UsageError(
                f"The training data is corrupt ({describe_corruption(error)}): write the file again."
            ) from None
        except tf.errors.OutOfRangeError:
            raise UsageError(
                f"The training data ended after step {int(self.global_step.numpy())}: return at least "
                "one whole global batch of examples, or a dataset that repeats."
            ) from None
        except tf.errors.ResourceExhaustedError as error:
            if not out_of_memory.is_told_by(error):
                raise
            raise UsageError(
                out_of_memory.advice(
                    self.layout.rows_per_replica,
                    self.update.choice,
                    accumulates=not self._own_train_step(),
                )
            ) from error
        self._position = int(self.global_step.numpy())
        self.non_finite = self.update.non_finite.take() if self.update.non_finite else None
        if self.non_finite and self.options.on_non_finite != "skip":
            raise NonFiniteStep(self.non_finite, self._examples_of(self.non_finite.step))
        return output

    def pass_over(self, batches: int) -> None:
        """Leaves the next batches out: `global_step` goes on, and the weights stay as they are."""
        self.global_step.assign_add(batches)

    def not_finite(self) -> str | None:
        """The name of the first variable of the model that is not finite, or None."""
        variables = [v for v in self.model.trainable_variables if v.dtype.is_floating]
        flags = [bool(tf.reduce_all(tf.math.is_finite(v))) for v in variables]
        return next((v.name for v, flag in zip(variables, flags, strict=True) if not flag), None)

    def _examples_of(self, step: int) -> list[int] | None:
        """The examples of a step's global batch, where they have numbers."""
        return self.feed.example_indexes(self.global_batch_size, step)

    @property
    def train_dataset(self) -> Any:
        """The distributed training data; set it to feed batches of your own making."""
        return self._train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        if self._compiled:
            raise UsageError(
                "runtime.xla=loop reads its data many batches at a time: choose runtime.xla=step to "
                "set train_dataset."
            )
        if self.options.on_non_finite == "rollback":
            raise UsageError(
                "on_non_finite=rollback reads batches again, as it can those of build_dataset alone: "
                "choose stop, skip or ignore to set train_dataset."
            )
        self._train_dataset, self._train_iter, self._own_dataset = dataset, None, True

    def train_loop_begin(self) -> None:
        """Resets the loop's metrics."""
        for metric in (self._loss, *self.metrics.values()):
            metric.reset_state()
        if self.update.norms:
            self.update.norms.reset()

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the loop's mean loss and its metrics."""
        results = {name: metric.result() for name, metric in self.metrics.items()}
        results = {"loss": self._loss.result(), **results}
        if precision.has_loss_scale(self.optimizer):
            results["loss_scale"] = self.optimizer.loss_scale
        if precision.has_loss_scale(self.optimizer) or self.options.on_non_finite == "skip":
            results["skipped_steps"] = self.skipped_steps.read_value()
        if self.update.norms:
            results.update(self.update.norms.result())
        return results

    def checkpoint_items(self) -> dict[str, Any]:
        """What a checkpoint must hold: every model, optimizer and variable, also those in lists.

        Metrics are left out, since a loop resets them; the data position is `global_step`, and random
        layers have no state.
        """
        trackable = tf.__internal__.tracking.Trackable
        passing = (tf_keras.metrics.Metric, tf.data.Dataset, tf.data.Iterator)
        left_out = ("metrics", "_train_dataset", "_train_iter", "_train_loop_fn")
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, trackable)
            and not isinstance(value, passing)
            and name not in left_out
            and not name.startswith("_self_")
        }

    def building(self) -> contextlib.AbstractContextManager[None]:
        """What everything of the trainer is made inside of: its seed and its precision."""
        return model_building.seed_and_precision(self.options.seed, self.options.precision)

    def rows(
        self, batch: Batch, present: tf.Tensor | None
    ) -> contextlib.AbstractContextManager[replica_rows.Examples]:
        """The rows that this replica holds, for the `with` around its step."""
        first, step = replica_rows.first_row(row_count(batch)), self.global_step.read_value()
        return replica_rows.examples(present, first_row=first, step=step)

    def _replica_train_step(self, batch: Batch, present: tf.Tensor | None) -> tf.Tensor:
        with self.rows(batch, present):
            value = self.replica_step(self.preprocess(batch))
            weight = None
            # A step that is left out is no part of the mean.
            if precision.has_loss_scale(self.optimizer) or self.options.on_non_finite == "skip":
                weight = tf.cast(tf.math.is_finite(value), value.dtype)
                value = tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))
            self._loss.update_state(value, sample_weight=weight)
        return value

    def _example_losses(self, batch: Batch) -> tuple[tf.Tensor, Any]:
        outputs = precision.cast_to_float32(self.forward(batch, training=True))
        return self.per_example_loss(batch, outputs), outputs

    def _update(
        self,
        batch: Batch,
        losses: Losses,
        *,
        variables: Sequence[tf.Variable] | None = None,
        optimizer: Optimizer | None = None,
        regularization: Callable[[], Sequence[tf.Tensor]] | None = None,
    ) -> Result:
        return self.update(
            batch,
            losses,
            weight=self.sample_weight(batch),
            variables=self.model.trainable_variables if variables is None else variables,
            optimizer=self.optimizer if optimizer is None else optimizer,
            regularization=regularization or self.regularization_losses,
        )

    def _key_other_models(self) -> None:
        """Keys the random layers of models that a subclass has beside `self.model`."""
        for name, held in vars(self).items():
            values = tf.nest.flatten(held) if isinstance(held, list | dict) else [held]
            for i, value in enumerate(values):
                scope = f"{name}/{i}"
                if not isinstance(value, tf_keras.Model) or value is self.model:
                    continue
                if scope not in self._keyed:
                    replica_random.key_random_layers(value, self.options.seed, scope=scope)
                    self._keyed.add(scope)

    def create_train_loop_fn(self) -> Any:
        """The inner loop: Orbit's, one XLA program, or what a coordinator schedules."""
        if coordinator.is_coordinated(self.strategy):
            return CoordinatedLoop(self.train_step, strategy=self.strategy)
        return self._compiled or super().create_train_loop_fn()

    def _check_spikes(self) -> None:
        own = type(self).replica_step is not StandardTrainer.replica_step
        if self.options.loss_spike and (own or self._own_train_step()):
            raise UsageError(
                "loss_spike looks at the one loss of ctl's own step, and this trainer has its own: set "
                "it to 0."
            )

    def _own_train_step(self) -> bool:
        return type(self).train_step is not StandardTrainer.train_step

    def _compile_loop(self) -> CompiledLoop:
        if self._own_train_step():
            raise UsageError("xla=loop does not call your train_step: choose another runtime.xla.")
        resident = None
        if self.options.placement == "device":
            with self.strategy.scope():
                resident = self.feed.copy_to_device(devices.replica_devices(self.strategy)[0])
        spec = self.feed.element_spec() if resident is None else tf.TensorSpec([None], tf.int64)

        def step(batch: Batch) -> None:
            self._replica_train_step(resident.gather(batch["index"]) if resident else batch, None)
            self.global_step.assign_add(1)

        size = chunk_size(spec, self.global_batch_size)
        return CompiledLoop(step, strategy=self.strategy, size=size)

    def _training_from(self, step: int) -> Any:
        if not self._compiled:
            return self.feed.training_dataset(self.global_batch_size, start=step)
        self._compiled.forget()
        return self.feed.training_chunks(
            self.global_batch_size,
            start=step,
            size=self._compiled.size,
            indexes_only=self.options.placement == "device",
        )

    def _outputs(self, batch: Batch) -> Any:
        return self.forward(self.preprocess(batch), training=False)


def unpack(element: Any) -> tuple[Batch, tf.Tensor | None]:
    """An element of a dataset of `(batch, present)`, or of batches, as `(batch, present)`."""
    return element if isinstance(element, tuple) else (element, None)
