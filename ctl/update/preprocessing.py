"""Calls the hooks that take a batch, such as `preprocess`, which must keep the number of rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import inspect
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.data.autograph import convert
from ctl.data.features import RESERVED, select_features
from ctl.data.source import Batch, Nest
from ctl.errors import UsageError, type_name
from ctl.keras import models
from ctl.rows.assertions import require_equal
from ctl.update.loss import Denominator, SampleWeight
from ctl.update.microbatches import LossFn, row_count
from ctl.update.part import Part

_KERAS = ("keras.", "tf_keras.")
_FACTOR = 16  # scales of images differ by 255, and by 127.5 around 0
_ADVICE = "return one entry per row (stack several views of a row on axis 1)."
_PROBLEM = f"preprocess returned another number of rows than the batch has: {_ADVICE}"

Metrics: TypeAlias = Mapping[str, tf_keras.metrics.Metric]


class Hooks(Protocol):
    """The functions of the user that a step calls: a `StandardTrainer`, or those of a `ctl.Step`."""

    @property
    def per_example_loss(self) -> LossFn:
        """(batch, outputs) -> losses."""

    @property
    def sample_weight(self) -> Callable[..., SampleWeight]:
        """(batch, training) -> weights, or (batch) -> weights."""

    @property
    def denominator(self) -> Callable[[Batch], Denominator]:
        """(batch) -> what the losses are divided by."""

    def preprocess(self, batch: Batch) -> Batch:
        """Prepares a replica's batch."""

    def forward(self, batch: Batch, training: bool) -> Nest:
        """Computes the outputs."""

    def update_metrics(
        self, metrics: Metrics, batch: Batch, outputs: Nest, weights: tf.Tensor | None
    ) -> None:
        """Updates the metrics."""

    def regularization_losses(self) -> Sequence[tf.Tensor]:
        """Returns the penalties."""

    def build_parts(self) -> Sequence[Part]:
        """Returns the parts of the user."""


def uint8_images(batch: Mapping[str, tf.Tensor | tf.TensorSpec]) -> list[str]:
    """Returns the names of the uint8 features with three or more axes, which are images."""
    values = {k: v for k, v in batch.items() if k not in RESERVED and v.dtype == tf.uint8}
    return [name for name, value in values.items() if value.shape.rank > 2]


def find_second_scaling(layers: Iterable[tf_keras.layers.Layer]) -> str:
    """Returns the name of a layer that seems to expect images of 0 to 255; "" if there is none.

    These are a Rescaling by a small factor, and a Normalization that has seen a mean above 1. A model
    that multiplies its images by 255 itself has none.
    """
    second = ""
    for layer in map(models.inner, layers):
        kinds = {c.__name__ for c in type(layer).__mro__ if c.__module__.startswith(_KERAS)}
        if "Rescaling" in kinds:
            scale = np.max(np.abs(layer.scale))
            if scale > _FACTOR:
                return ""
            second = second or layer.name * bool(scale < 1 / _FACTOR)
        elif "Normalization" in kinds and getattr(layer, "mean", None) is not None:
            mean = tf.get_static_value(layer.mean)
            # Two axes are those of rows of numbers, which are no image.
            if mean is not None and np.ndim(mean) != 2 and np.max(np.abs(mean)) > 1:
                second = second or layer.name
    return second


def call_sample_weight(hooks: Hooks, batch: Batch, *, training: bool) -> SampleWeight:
    """Calls the user's `sample_weight`, whose overrides need not have the argument `training`."""
    hook = hooks.sample_weight
    if "training" in inspect.signature(hook).parameters:
        return convert(hook)(batch, training=training)
    return convert(hook)(batch)


def default_sample_weight(batch: Batch) -> SampleWeight:
    """Returns `batch["weight"]`, or None.

    Raises:
        UsageError: the batch has no label, so that the weight may be a feature.
    """
    # Batches of ctl.data.packed have segment_ids, and weights that ctl has made.
    if "weight" in batch and not batch.keys() & {"label", "segment_ids"}:
        raise UsageError(
            'The batch has "weight" and no "label", so "weight" may be a feature or the weight of the '
            "losses: rename it if it is a feature, or let sample_weight return "
            'batch["weight"] if it is the weight.'
        )
    return batch.get("weight")


def call_model(model: tf_keras.Model, batch: Batch, *, training: bool) -> Nest:
    """Calls a model with the features of a batch: with the only one, or with a dict of them."""
    features = select_features(batch)
    inputs = next(iter(features.values())) if len(features) == 1 else features
    return model(select_inputs(model, inputs), training=training)


def select_inputs(model: tf_keras.Model, features: Nest) -> Nest:
    """Returns the features that a functional model has inputs for, which it would select by itself.

    tf_keras would warn of the others, such as the `positions` of sequences, in every trace.

    Args:
        model: any model; unless all its inputs have names of features, all features are returned.
        features: a dict of tensors, or a tensor.
    """
    inputs = getattr(model, "input", None)  # of other models, it is an AttributeError
    names = inputs if isinstance(inputs, Mapping) else getattr(model, "input_names", None)
    if not names or not isinstance(features, Mapping) or not features.keys() >= {*names}:
        return features
    return {name: features[name] for name in names}


def preprocess(hooks: Hooks, batch: Batch) -> Batch:
    """Calls the user's `preprocess`, which must keep the number of rows.

    Draws and dropout are keyed by the position of a row, which would otherwise be another row's.

    Args:
        hooks: the functions of the user.
        batch: a replica's rows.

    Raises:
        UsageError: the result is not a dict, or the number of rows changed. If a number is known only
            when the step runs, the step fails, and `explained` raises the error.
    """
    prepared = convert(hooks.preprocess)(batch)
    if not isinstance(prepared, dict):
        raise UsageError(
            f"preprocess returned {type_name(prepared)}, but must return the batch, a dict of tensors."
        )
    before = row_count(batch)
    # The features that the batch had before have its number of rows.
    unchanged = {id(value) for value in tf.nest.flatten(batch)}

    def check(value: Any) -> Any:
        if id(value) in unchanged or not isinstance(value, tf.Tensor) or not value.shape.rank:
            return value
        after = row_count({"": value})
        if isinstance(before, int) and isinstance(after, int):
            if before != after:
                raise UsageError(
                    f"preprocess returned {after} rows for a batch of {before}: {_ADVICE}"
                )
            return value
        with require_equal(before, after, _PROBLEM):
            return tf.identity(value)

    return tf.nest.map_structure(check, prepared)
