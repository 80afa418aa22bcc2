"""Checks the data that a trainer's `build_dataset` returns, and derives the spec of its batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import augmentation
from ctl.data.autograph import traced
from ctl.data.source import (
    Augmented,
    Data,
    GlobalBatches,
    PerReplica,
    Source,
    dataset_of,
    source_of,
)
from ctl.errors import UsageError


def check_data(data: Any, split: str) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch with an unknown number of rows.

    Raises:
        UsageError: `build_dataset` may not return this data for this split.
    """
    if not isinstance(data, Source | tf.data.Dataset | Augmented | GlobalBatches | PerReplica):
        raise UsageError(
            f"build_dataset({split!r}, ...) returned {type(data).__name__}, but must return a "
            "ctl.data.Source, a tf.data.Dataset of examples, ctl.data.augmented(...), "
            f"ctl.data.GlobalBatches or ctl.data.PerReplica{_suggest_source(data)}"
            f"{'.' if split == 'train' else f', or remove {split} from eval.splits.'}"
        )
    if isinstance(data, Augmented) and split != "train":
        raise UsageError(
            f"build_dataset({split!r}, ...) returned augmented examples: return them unchanged."
        )
    source = source_of(data)
    count = len(source) if source is not None else int(dataset_of(data).cardinality())
    # An unknown or infinite cardinality is negative.
    if count == 0:
        raise UsageError(
            f"build_dataset({split!r}, ...) returned no examples, but must return at least one."
        )
    spec = element_spec(data)
    if source is None and not isinstance(data, GlobalBatches | PerReplica):
        _check_single_examples(dataset_of(data))
    return spec


def _suggest_source(data: Any) -> str:
    """Names the function that makes a source of data of a common type, for a message."""
    if isinstance(data, Iterator):
        return ", such as ctl.data.generator(function)"
    is_table = isinstance(data, dict | np.ndarray) or hasattr(data, "iloc")
    return ", such as ctl.data.arrays(...)" if is_table else ""


def element_spec(data: Data) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch with an unknown number of rows, for building the model.

    Raises:
        UsageError: the elements are not dicts of tensors of known rank.
    """
    if isinstance(data, Augmented):
        # The augmentation takes single examples, so its input has no batch axis.
        example = tf.nest.map_structure(
            lambda s: tf.TensorSpec(s.shape[1:], s.dtype), element_spec(data.data)
        )
        spec, is_batched = augmentation.output_spec(data.augment, example), False
    elif isinstance(data, Source):
        # Traces `gather` without reading any example.
        gather = traced(data.gather)
        indexes = tf.TensorSpec([None], tf.int64)
        outputs = gather.get_concrete_function(indexes).structured_outputs
        spec, is_batched = tf.nest.map_structure(tf.type_spec_from_value, outputs), True
    else:
        spec = dataset_of(data).element_spec
        is_batched = isinstance(data, GlobalBatches | PerReplica)
    if not isinstance(spec, dict) or not spec:
        raise UsageError(
            f"The elements of the data are {spec}, but must be dicts, such as "
            '{"x": ..., "label": ...}, or (x, label) or (x, label, weight) of a dataset.'
        )
    return tf.nest.map_structure(lambda s: _batch_spec(s, is_batched, spec), spec)


# The transformations of tf.data that do not change the elements of a dataset.
_SAME_ELEMENTS = ("Cache", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take")
_SPLIT_ELEMENTS = ("FlatMap", "Interleave", "Unbatch", "Window")


def _check_single_examples(dataset: tf.data.Dataset) -> None:
    """Raises UsageError for a dataset whose elements are batches."""
    specs = tf.nest.flatten(dataset.element_spec)
    # In a batch, the first axis of every feature holds the rows.
    sizes = {spec.shape[0] if spec.shape.rank else 0 for spec in specs}
    if len(sizes) != 1 or 0 in sizes:
        return
    # A static size after a `map` may also be the length of a sequence, made by `batch` as in
    # TensorFlow's text tutorials.
    is_static = None not in sizes
    while True:
        kind = type(dataset).__name__
        if "Batch" in kind and "Unbatch" not in kind:
            raise UsageError(
                f"The elements of the data are batches, {element_shapes(specs)}, but must be single "
                "examples, which ctl batches: remove batch(...) from the dataset, or return "
                "ctl.data.GlobalBatches(dataset). If they are single examples, give them a static "
                "shape by tf.ensure_shape."
            )
        transparent = any(name in kind for name in _SAME_ELEMENTS)
        if any(name in kind for name in _SPLIT_ELEMENTS) or (is_static and not transparent):
            return
        inputs = dataset._inputs()
        if len(inputs) != 1:
            return
        dataset = inputs[0]


def element_shapes(specs: Sequence[tf.TensorSpec]) -> str:
    """Returns the shapes of specs for a message, such as "(None, 3) and (None,)"."""
    return " and ".join(str(tuple(spec.shape)) for spec in specs)


def _batch_spec(spec: Any, is_batched: bool, element: Any) -> tf.TensorSpec:
    """Returns the spec of a feature in a batch of unknown size.

    Args:
        spec: the feature in an element of the data.
        is_batched: whether `spec` already has the batch axis.
        element: the spec of the element, for the message.
    """
    if isinstance(spec, tf.RaggedTensorSpec):
        raise UsageError(
            f"The elements of the data are {element}, with features of variable length: return "
            "ctl.data.packed(source, length) or ctl.data.bucketed(source, boundaries)."
        )
    is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None
    if not is_dense or spec.shape.rank < is_batched:
        batch_axis = " whose first axis is the batch axis" if is_batched else ""
        raise UsageError(
            f"The elements of the data are {element}, but must be dense tensors of known rank"
            f"{batch_axis} (tf.ensure_shape, tf.sparse.to_dense)."
        )
    return tf.TensorSpec([None, *(spec.shape[1:] if is_batched else spec.shape)], spec.dtype)
