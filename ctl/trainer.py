"""StandardTrainer: a person's step, and around it everything that must be right on every replica."""

import abc
import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.data import distribution, pipeline
from ctl.data.source import Batch, GlobalBatches, Source
from ctl.errors import UsageError
from ctl.options import TrainerOptions
from ctl.replica import gradients, loss, precision
from ctl.replica import random as replica_random
from ctl.replica import rows as replica_rows

_LOG = logging.getLogger("ctl")
Optimizer = tf_keras.optimizers.Optimizer


class StandardTrainer(orbit.StandardTrainer, metaclass=abc.ABCMeta):
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
        self._position: int | None = None
        self._sources: dict[str, Source] = {}
        self._own_dataset = False
        replicas = self.strategy.num_replicas_in_sync
        self.layout = pipeline.Layout(global_batch_size=global_batch_size, replicas=replicas)
        with self._building(), self.strategy.scope():
            self.model = self.build_model()
            self.optimizer = optimizer() if callable(optimizer) else optimizer
            self.metrics: dict[str, tf_keras.metrics.Metric] = self.build_metrics()
            self._loss = tf_keras.metrics.Mean("loss", dtype=self.variable_dtype)
            self.global_step = tf.Variable(
                0,
                dtype=tf.int64,
                trainable=False,
                name="global_step",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            self._build_variables()
        replica_random.key_random_layers(self.model, self.options.seed)
        self._check_model()

    # What a person writes.

    @abc.abstractmethod
    def build_model(self) -> tf_keras.Model:
        """Makes the model. Called once, under the strategy's scope and the run's precision."""

    @abc.abstractmethod
    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> pipeline.Data:
        """Makes the examples of a split.

        Args:
            split: "train" or "eval".
            input_context: the input pipeline that it is for. A pipeline wants ALL examples: ctl picks
                the rows of its replicas.

        Returns:
            A `ctl.data.Source`; a `tf.data.Dataset` of single examples, in an order that does not
            change from run to run; or `ctl.data.GlobalBatches` or `ctl.data.PerReplica`.
        """

    def preprocess(self, batch: Batch) -> Batch:
        """Prepares a batch on the device, so that bytes travel and floats need not.

        By default uint8 features are pixels: they become numbers in [0, 1].
        """
        dtype = self.compute_dtype
        return {
            name: tf.cast(value, dtype) / 255 if value.dtype == tf.uint8 else value
            for name, value in batch.items()
        }

    def forward(self, batch: Batch, training: bool) -> Any:
        """Computes the model's outputs.

        By default the model gets the one feature that is neither `label` nor `weight`, or a dict of
        them where there are several.
        """
        features = {k: v for k, v in batch.items() if k not in ("label", "weight")}
        inputs = next(iter(features.values())) if len(features) == 1 else features
        return self.model(inputs, training=training)

    @abc.abstractmethod
    def per_example_loss(self, batch: Batch, outputs: Any) -> tf.Tensor:
        """Computes each example's loss.

        Args:
            batch: what `preprocess` returned, [rows, ...] each.
            outputs: what `forward` returned.

        Returns:
            [rows] losses, not reduced: ctl divides by the weight of the global batch, once.
        """

    def sample_weight(self, batch: Batch) -> tf.Tensor | None:
        """What each example counts in the loss: [rows], or None for 1. By default `batch["weight"]`."""
        return batch.get("weight")

    def regularization_losses(self) -> Sequence[tf.Tensor]:
        """Scalars that are functions of the variables alone, counted once an update."""
        return self.model.losses

    def build_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """Makes the metrics, by name. Called under the strategy's scope, for training and evaluation."""
        return {}

    def update_metrics(
        self,
        metrics: Mapping[str, tf_keras.metrics.Metric],
        batch: Batch,
        outputs: Any,
        weights: tf.Tensor | None,
    ) -> None:
        """Updates the metrics by one replica's batch.

        Args:
            metrics: what `build_metrics` returned.
            batch: what `preprocess` returned.
            outputs: what `forward` returned.
            weights: [rows], 1 for a row that exists and 0 for padding; None when all exist. Pass it
                on as `sample_weight`. Sample weights of the loss are not in it.
        """
        if metrics and "label" not in batch:
            raise UsageError('The batch has no "label": override update_metrics to feed the metrics.')
        for metric in metrics.values():
            metric.update_state(batch["label"], outputs, sample_weight=weights)

    def replica_step(self, batch: Batch) -> tf.Tensor:
        """One replica's whole step; `minimize` once, by default. Override it for a GAN.

        Args:
            batch: this replica's rows, preprocessed.

        Returns:
            The loss of the global batch, a scalar, the same on every replica.
        """
        return self.minimize(batch, self._example_losses)

    # What ctl does around it.

    @property
    def compute_dtype(self) -> tf.DType:
        """What the layers compute in."""
        return precision.compute_dtype(self.options.precision)

    @property
    def variable_dtype(self) -> tf.DType:
        """What the variables are kept in."""
        return precision.variable_dtype(self.options.precision)

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
            optimizer: by default the trainer's.
            regularization: gives the scalars to add once; by default `regularization_losses`.

        Returns:
            The loss of the global batch, the same on every replica.
        """
        variables = self.model.trainable_variables if variables is None else variables
        parts = self._loss_parts(batch, losses, regularization or self.regularization_losses)
        found, value = gradients.accumulate(parts, variables)
        self._warn_unused(found, variables)
        found, value = gradients.all_reduce(found, value)
        found = gradients.clip(found, self.options.clip)
        gradients.apply(self.optimizer if optimizer is None else optimizer, found, variables)
        return value

    def train_step(self, iterator: Any) -> None:
        """One step of every replica; Orbit's hook.

        Args:
            iterator: of `(batch, present)`, or of batches.
        """
        batch, present = unpack(next(iterator))
        value = self.strategy.run(self._replica_train_step, args=(batch, present))
        # A step that fails is not counted.
        with tf.control_dependencies(list(self.strategy.experimental_local_results(value))):
            self.global_step.assign_add(1)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any] | None:
        """Trains `num_steps` steps from where `global_step` stands in the data."""
        step = int(self.global_step.numpy())
        if not self._own_dataset and self._position != step:
            self._train_dataset, self._train_iter = self._distributed_training(step), None
        self._position = None  # until the loop has ended well
        try:
            output = super().train(num_steps)
        except tf.errors.OutOfRangeError:
            raise UsageError(
                f"The training data ended after step {int(self.global_step.numpy())}: return at least "
                "one whole global batch of examples, or a dataset that repeats."
            ) from None
        self._position = int(self.global_step.numpy())
        return output

    @property
    def train_dataset(self) -> Any:
        """The distributed training data; set it to feed batches of your own making."""
        return self._train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self._train_dataset, self._train_iter, self._own_dataset = dataset, None, True

    def train_loop_begin(self) -> None:
        """Resets the loop's metrics."""
        for metric in (self._loss, *self.metrics.values()):
            metric.reset_state()

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the loop's mean loss and its metrics."""
        results = {name: metric.result() for name, metric in self.metrics.items()}
        return {"loss": self._loss.result(), **results}

    def checkpoint_items(self) -> dict[str, Any]:
        """What a checkpoint must hold: every model, optimizer, variable and generator of the trainer.

        Metrics are left out, since a loop resets them; the data position is `global_step`, and random
        layers have no state.
        """
        kinds = (tf.Variable, tf.random.Generator, tf.Module, tf_keras.layers.Layer, Optimizer)
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, kinds)
            and not isinstance(value, tf_keras.metrics.Metric)
        }

    def data(self, split: str, context: tf.distribute.InputContext | None = None) -> pipeline.Data:
        """What `build_dataset` returns for a split and an input pipeline.

        A `Source` is made once, since every pipeline reads all of it. A dataset is made anew each time: iterated again, one that shuffles
        would go on in another order.
        """
        context = context or tf.distribute.InputContext(
            num_replicas_in_sync=self.strategy.num_replicas_in_sync
        )
        if split in self._sources:
            return self._sources[split]
        with self._building():
            data = self.build_dataset(split, context)
        pipeline.check(data, split)
        if isinstance(data, Source):
            self._sources[split] = data
        return data

    def rows(
        self, present: tf.Tensor | None
    ) -> contextlib.AbstractContextManager[replica_rows.Examples]:
        """The rows that this replica holds, for the `with` around its step."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.cast(replica, tf.int64) * self.layout.rows
        return replica_rows.examples(present, first_row=first, step=self.global_step.read_value())

    def _replica_train_step(self, batch: Batch, present: tf.Tensor | None) -> tf.Tensor:
        with self.rows(present):
            value = self.replica_step(self.preprocess(batch))
            self._loss.update_state(value)
        return value

    def _example_losses(self, batch: Batch) -> tf.Tensor:
        outputs = self.forward(batch, training=True)
        self.update_metrics(self.metrics, batch, outputs, replica_rows.present())
        return self.per_example_loss(batch, outputs)

    def _loss_parts(
        self,
        batch: Batch,
        losses: Callable[[Batch], tf.Tensor],
        regularization: Callable[[], Sequence[tf.Tensor]],
    ) -> list[Callable[[], tf.Tensor]]:
        """One callable a micro-batch: its share of the global loss."""
        dtype = self.variable_dtype
        whole = replica_rows.current()
        weights = loss.row_weights(self.sample_weight(batch), whole.present, dtype)
        rows = row_count(batch)
        denominator = loss.global_weight(weights, rows, self.global_batch_size, dtype)
        slices = micro_batches(rows, self.options.gradient_accumulation_steps)
        parts = self.strategy.num_replicas_in_sync * len(slices)

        def part(start: Any, end: Any) -> tf.Tensor:
            def cut(value: tf.Tensor | None) -> tf.Tensor | None:
                return value if value is None or len(slices) == 1 else value[start:end]

            with replica_rows.examples(
                cut(whole.present),
                first_row=whole.first_row + tf.cast(start, tf.int64),
                step=whole.step,
            ):
                per_example = losses(tf.nest.map_structure(cut, batch))
                mine = loss.share(per_example, cut(weights), denominator)
                penalty = loss.regularization_share(list(regularization()), parts, mine.dtype)
            return mine if penalty is None else mine + penalty

        return [lambda s=start, e=end: part(s, e) for start, end in slices]

    def _distributed_training(self, step: int) -> Any:
        if isinstance(self.data("train"), GlobalBatches):
            batches = pipeline.global_batches(self.data("train"), start=step, endless=True)
            return distribution.global_batches(self.strategy, batches)

        def dataset_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
            return pipeline.training(
                self.data("train", input_context),
                pipeline.Layout.of(input_context, self.global_batch_size),
                seed=self.options.seed,
                start=step,
                prefetch=self.options.prefetch,
            )

        return distribution.from_function(self.strategy, dataset_fn)

    def _build_variables(self) -> None:
        """Makes every variable now, so that a checkpoint can be restored before the first step."""
        spec = pipeline.element_spec(self.data("train"))

        def outputs(batch: Batch) -> Any:
            return self.forward(self.preprocess(batch), training=False)

        # Traced, not run: an example of zeros might not be one that the model can read.
        tf.function(outputs).get_concrete_function(spec)
        self.optimizer.build(self.model.trainable_variables)

    def _check_model(self) -> None:
        accumulation = self.options.gradient_accumulation_steps
        if accumulation > self.layout.rows:
            raise UsageError(
                f"gradient_accumulation_steps is {accumulation}, and a replica has "
                f"{self.layout.rows} rows a batch: want at most that."
            )
        for layer in self.model._flatten_layers():
            if getattr(layer, "activity_regularizer", None) is not None:
                self._check_activity_regularizer(layer.name, accumulation)
            plain = isinstance(layer, tf_keras.layers.BatchNormalization)
            if plain and (accumulation > 1 or self.layout.replicas > 1 or not self.layout.even):
                _LOG.warning(
                    "%s normalizes by the statistics of a replica's micro-batch, padding included: "
                    "with it, the update depends on how the batch is split.", layer.name,
                )

    def _check_activity_regularizer(self, name: str, accumulation: int) -> None:
        if self.layout.even and self.layout.rows % accumulation == 0:
            return
        raise UsageError(
            f"Layer {name} has an activity regularizer, a mean over the rows of a micro-batch, and "
            f"{self.global_batch_size} rows do not split evenly into {self.layout.replicas} replicas "
            f"x {accumulation} micro-batches: choose a batch that does, or add the penalty to "
            "per_example_loss."
        )

    def _warn_unused(
        self, found: Sequence[gradients.Gradient], variables: Sequence[tf.Variable]
    ) -> None:
        names = [v.name for g, v in zip(found, variables, strict=True) if g is None]
        if names and names != getattr(self, "_unused", None):
            self._unused = names
            _LOG.warning("The loss does not depend on %s: left as it is.", ", ".join(names))

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Makes what is built inside a function of the seed and the precision, and of nothing else."""
        python, numpy = random.getstate(), np.random.get_state()
        tf_keras.utils.set_random_seed(self.options.seed)
        try:
            with precision.building(self.options.precision):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def unpack(element: Any) -> tuple[Batch, tf.Tensor | None]:
    """An element of a dataset of `(batch, present)`, or of batches, as `(batch, present)`."""
    return element if isinstance(element, tuple) else (element, None)


def row_count(batch: Batch) -> int | tf.Tensor:
    """The number of rows of a batch, as a Python int where it is known."""
    first = tf.nest.flatten(batch)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def micro_batches(rows: int | tf.Tensor, count: int) -> list[tuple[Any, Any]]:
    """Where each of `count` micro-batches of `rows` rows starts and ends, sizes as equal as can be."""
    return [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
