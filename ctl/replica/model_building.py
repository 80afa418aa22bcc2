"""What is built before the first step, and what must be true of it."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import logging
import random
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.replica import precision
from ctl.replica.batch_norm import SyncBatchNormalization, convert_sync_batch_norm

_LOG = logging.getLogger("ctl")


@contextlib.contextmanager
def seed_and_precision(seed: int, precision_name: str) -> Iterator[None]:
    """Makes what is built inside a function of the seed and the precision, and of nothing else.

    Args:
        seed: of Python's, numpy's and TensorFlow's generators; the first two are put back after.
        precision_name: what layers, metrics and optimizers built inside compute in.
    """
    python, numpy = random.getstate(), np.random.get_state()
    tf_keras.utils.set_random_seed(seed)
    try:
        with precision.precision_scope(precision_name):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def make_optimizer(optimizer: Any) -> Any:
    """The optimizer, made here if it is not yet.

    The variable that holds a schedule's present rate is set by all replicas alike, which central
    storage allows only to a variable that says whose value counts; tf_keras does not say.
    """
    if not callable(optimizer):
        return optimizer

    def saying(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        if arguments.get("name") == "current_learning_rate":
            arguments["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return next_creator(**arguments)

    with tf.variable_creator_scope(saying):
        return optimizer()


def create_variables(forward: Callable[[Any], Any], spec: Any) -> None:
    """Makes a model's variables now, so that a checkpoint can be restored before the first step.

    Traced, not run: an example of zeros might not be one that the model can read.
    """
    tf.function(forward).get_concrete_function(spec)


def apply_sync_batch_norm(model: tf_keras.Model, keys: Mapping[str, Any]) -> tf_keras.Model:
    """The model, its batch normalizations synchronized where `model.sync_batch_norm` asks for it.

    Args:
        model: what `build_model` returned; it is changed in place.
        keys: the `model` section. `sync_batch_norm` is True for statistics of the global batch, or
            "per_micro_batch", which allows gradient accumulation with statistics of micro-batches.
    """
    asked = keys.get("sync_batch_norm")
    if asked not in (None, False, True, "per_micro_batch"):
        raise UsageError(
            f"model.sync_batch_norm is {asked!r}, want True, False or 'per_micro_batch'."
        )
    if asked and not convert_sync_batch_norm(model) and not has_sync_batch_norm(model):
        raise UsageError(
            "model.sync_batch_norm has no effect: the model has no BatchNormalization."
        )
    return model


def check_model(model: tf_keras.Model, layout: Layout, *, parts: int, full: bool) -> None:
    """Refuses, or warns of, what would make the update depend on how the batch is split.

    Args:
        model: the built model.
        layout: how a global batch falls to the replicas.
        parts: micro-batches, or logical shards, that the rows are computed in.
        full: whether every batch is a full one.
    """
    even = layout.even and full and layout.rows_per_replica % parts == 0
    split = layout.replicas > 1 or parts > 1 or not even
    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is not None and not even:
            raise UsageError(
                f"Layer {layer.name} has an activity regularizer, a mean over the rows of a part of "
                f"the batch, and not all parts have equally many of {layout.global_batch_size} rows: "
                "choose a batch that splits evenly, or add the penalty to per_example_loss."
            )
        plain = isinstance(layer, tf_keras.layers.BatchNormalization)
        if plain and not isinstance(layer, SyncBatchNormalization) and split:
            _LOG.warning(
                "%s normalizes by the statistics of a part of the batch, padding included: with it, "
                "the update depends on how the batch is split. Use ctl.SyncBatchNormalization, or "
                "model.sync_batch_norm=True.",
                layer.name,
            )


def has_sync_batch_norm(model: tf_keras.Model) -> bool:
    """Whether a layer of the model reduces over the replicas."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
