"""StandardTrainer: subclass it with a model, data and a loss, and override as much more as you need."""

import abc
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert
from ctl.data.source import Batch, Data
from ctl.errors import UsageError
from ctl.replica.step.build import build_engine
from ctl.replica.step.loop_trainer import LoopTrainer
from ctl.replica.step.metrics import update as update_metric


class StandardTrainer(LoopTrainer, metaclass=abc.ABCMeta):
    """Trains a model by a step whose update is a function of the global batch alone.

        class Digits(ctl.StandardTrainer):
            def build_model(self):
                return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(10)])

            def build_dataset(self, split, input_context):
                return ctl.data.idx("experiments/data/mnist", split)

            def per_example_loss(self, batch, outputs):
                return tf_keras.losses.sparse_categorical_crossentropy(
                    batch["label"], outputs, from_logits=True)

        trainer = Digits(global_batch_size=64, optimizer=lambda: tf_keras.optimizers.Adam(1e-3))
        trainer.train(tf.constant(1000))

    The methods to override come first, from small to large; each is given what the ones before it
    returned. A batch is a dict of tensors of shape [rows, ...].

    Args:
        global_batch_size: examples per update, over all replicas and micro-batches.
        optimizer: an optimizer made in the strategy's scope, or a function that makes one. It may be
            omitted if the class overrides `build_optimizer`.
        strategy: the strategy whose replicas compute a step; the current strategy by default.
        options: all other options, which are frozen.

    Attributes:
        model: the result of `build_model`.
        optimizer: the tf_keras optimizer; its `iterations` counts the applied updates.
        metrics: name -> metric of the training loop.
        global_step: int64 variable, the number of consumed batches, which is the position in the data.
        skipped_steps: int64 variable, the number of updates that were not applied.
        non_finite_report: the steps of the last loop that were not finite; None if all were.

    Raises:
        UsageError: the options cannot compute the right update with this model, data or strategy.
    """

    model: tf_keras.Model
    optimizer: Any
    metrics: dict[str, tf_keras.metrics.Metric]
    global_step: tf.Variable
    skipped_steps: tf.Variable

    def __init__(
        self,
        *,
        global_batch_size: int,
        optimizer: Any = None,
        strategy: tf.distribute.Strategy | None = None,
        options: TrainerOptions | None = None,
    ):
        super().__init__(train_dataset=None)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.global_batch_size = global_batch_size
        self.options = options or TrainerOptions()
        self.non_finite_report = None
        # The only private attribute, so that the private attributes of a subclass do not collide.
        self._ctl_engine = build_engine(self, optimizer, StandardTrainer)

    # What a subclass must define.

    @abc.abstractmethod
    def build_model(self) -> tf_keras.Model:
        """Builds the model; called once, in `build_scope`."""

    @abc.abstractmethod
    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Data:
        """Builds the examples of a split.

        Args:
            split: "train", or one of `eval.splits`, which is "eval" by default.
            input_context: the input pipeline of `ctl.data.PerReplica` data. For all other data it
                describes a single pipeline, since every pipeline reads ALL examples: ctl selects the
                rows of each replica.

        Returns:
            A `ctl.data.Source`; a `tf.data.Dataset` of single examples, in the same order in every
            run; or `ctl.data.GlobalBatches` or `ctl.data.PerReplica`. The elements of a dataset are
            dicts; `(x, y)` and `(x, y, w)` are read as {"x": x, "label": y, "weight": w}.
        """

    def per_example_loss(self, batch: Batch, outputs: Any) -> tf.Tensor:
        """Computes the loss of each example; not needed if `replica_step` is overridden.

        Args:
            batch: what `preprocess` returned, [rows, ...] each.
            outputs: what `forward` returned.

        Returns:
            [rows] losses, not reduced: ctl divides once, by the weight of the global batch. Losses of
            tokens or pixels, [rows, ...], require weights of the same shape from `sample_weight`. A
            loss that compares rows reads the rows of the global batch by `ctl.replica.all_gather`.
        """
        raise UsageError(f"{type(self).__name__} does not define per_example_loss.")

    # What a subclass may override, from small to large.

    def preprocess(self, batch: Batch) -> Batch:
        """Prepares a batch on the device, so that uint8 is sent there instead of floats.

        By default, uint8 features with three or more axes are images and are scaled to [0, 1]. Labels
        and weights are unchanged.
        """
        images = [
            name
            for name, value in batch.items()
            if value.dtype == tf.uint8 and value.shape.rank > 2 and name not in ("label", "weight")
        ]
        return {**batch, **{k: tf.cast(batch[k], self.compute_dtype) / 255 for k in images}}

    def forward(self, batch: Batch, training: bool) -> Any:
        """Computes the model's outputs.

        By default the model is called with the one feature that is neither `label` nor `weight`, or
        with a dict of them if there are several.
        """
        features = {k: v for k, v in batch.items() if k not in ("label", "weight")}
        inputs = next(iter(features.values())) if len(features) == 1 else features
        return self.model(inputs, training=training)

    def sample_weight(self, batch: Batch) -> tf.Tensor | None:
        """Returns the weights of the losses, in their shape; `batch["weight"]` by default.

        The loss of the global batch is sum(weights x losses) / sum(weights). So if the weight of an
        example is its number of tokens, its loss must be the mean over its tokens, not the sum.
        """
        return batch.get("weight")

    def regularization_losses(self) -> Sequence[tf.Tensor]:
        """Returns scalars that depend on the variables alone; they are added once per update."""
        return self.model.losses

    def build_optimizer(self, optimizer: Any) -> Any:
        """Returns the optimizer; called in `build_scope`, after `build_model`.

        Args:
            optimizer: the constructor's argument. In an experiment it is a function that makes the
                optimizer of the config's section `optimizer`.

        Returns:
            A tf_keras optimizer. By default `optimizer()`, or `optimizer` itself if it is one.
        """
        if optimizer is None:
            raise UsageError(
                "The trainer has no optimizer: pass its constructor optimizer=..., or override "
                "build_optimizer."
            )
        return optimizer() if callable(optimizer) else optimizer

    def build_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """Builds the metrics by name; called in `build_scope`, for training and for evaluation."""
        return {}

    def build_actions(self) -> Sequence[Callable[[Any], Any]]:
        """Builds the actions to run after loops and evaluations: `ctl.Action`s or Orbit's."""
        return []

    def update_metrics(
        self,
        metrics: Mapping[str, tf_keras.metrics.Metric],
        batch: Batch,
        outputs: Any,
        weights: tf.Tensor | None,
    ) -> None:
        """Updates the metrics with one replica's batch, or with one of its micro-batches.

        By default every metric compares `batch["label"]` with the outputs, of any shapes that
        tf_keras' `compile` accepts. An override calls `ctl.replica.update_metric`, which removes
        padding, or the metric's own `update_state`.

        Args:
            metrics: what `build_metrics` returned.
            batch: what `preprocess` returned.
            outputs: what `forward` returned.
            weights: [rows], 1 for a row that exists and 0 for padding; None if all exist. It does not
                contain the loss' sample weights: multiply it by them to weight the metrics as well.
        """
        if metrics and "label" not in batch:
            raise UsageError('The batch has no "label": override update_metrics.')
        for name, metric in metrics.items():
            update_metric(metric, batch["label"], outputs, weights, name=name)

    def collect_outputs(self, batch: Batch, outputs: Any) -> dict[str, tf.Tensor]:
        """Returns the values that an evaluation collects for `compute_metrics`; none by default.

        Args:
            batch: what `preprocess` returned.
            outputs: what `forward` returned.

        Returns:
            name -> [rows, ...] floats, integers or bools. Return scores and not images: the values
            of all examples are in the memory of the host (`eval.collect_limit_mib`).
        """
        return {}

    def compute_metrics(self, collected: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Computes metrics that are not sums over batches; called once per evaluation.

        Args:
            collected: what `collect_outputs` returned, [examples, ...]: every example once, in the
                order of the data.

        Returns:
            name -> number, which the evaluation returns like those of `build_metrics`.
        """
        return {}

    def serve(self, features: Batch) -> Any:
        """Computes the outputs of an exported model; `ctl.load` calls it, too.

        By default `preprocess` and then `forward`, as in an evaluation.

        Args:
            features: [rows, ...] raw features, as `build_dataset` gives them. A label or weight that
                `preprocess` reads is 0 and must not change the outputs.

        Returns:
            A tensor, or a dict or sequence of tensors, [rows, ...] each.
        """
        return convert(self.forward)(convert(self.preprocess)(features), training=False)

    def export_signatures(self) -> dict[str, Callable[[Batch], Any]]:
        """Returns the signatures of an exported model: name -> function of the raw features."""
        return {"serving_default": self.serve}

    def replica_step(self, batch: Batch) -> tf.Tensor:
        """Computes one replica's step; an override calls `minimize` for each update, as in a GAN.

        Args:
            batch: this replica's rows, preprocessed.

        Returns:
            The loss of the global batch, a scalar, the same on every replica.
        """
        result = self._ctl_engine.step(
            batch,
            self.per_example_loss,
            forward=functools.partial(self.forward, training=True),
            sample_weight=convert(self.sample_weight)(batch),
            variables=self.model.trainable_variables,
            optimizer=self.optimizer,
            regularization=self.regularization_losses,
        )
        self._ctl_engine.results.update_metrics(result.micro_batches)
        return result.loss
