"""What a person writes of a trainer, from small to large; each has what the ones before it gave."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.source import Batch, Data
from ctl.errors import UsageError
from ctl.replica import precision


class Hooks(abc.ABC):
    """The model, the data and the loss of an example; `StandardTrainer` adds the whole step.

    A batch is a dict of tensors of shape [rows, ...].

    Attributes:
        options: the frozen `TrainerOptions`.
        model: what `build_model` returned.
    """

    options: TrainerOptions
    model: tf_keras.Model

    @abc.abstractmethod
    def build_model(self) -> tf_keras.Model:
        """Makes the model. Called once, under the strategy's scope and the run's precision."""

    @abc.abstractmethod
    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Data:
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

        By default uint8 features of three axes or more are pixels: they become numbers in [0, 1].
        Labels and weights stay as they are.
        """
        dtype = self.compute_dtype
        pixels = [
            name
            for name, value in batch.items()
            if value.dtype == tf.uint8 and value.shape.rank > 2 and name not in ("label", "weight")
        ]
        return {**batch, **{name: tf.cast(batch[name], dtype) / 255 for name in pixels}}

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
            raise UsageError(
                'The batch has no "label": override update_metrics to feed the metrics.'
            )
        for metric in metrics.values():
            metric.update_state(batch["label"], outputs, sample_weight=weights)

    @property
    def compute_dtype(self) -> tf.DType:
        """What the layers compute in."""
        return tf.as_dtype(precision.of(self.options.precision).compute)

    @property
    def variable_dtype(self) -> tf.DType:
        """What the variables are kept in."""
        return tf.as_dtype(precision.of(self.options.precision).floatx)
