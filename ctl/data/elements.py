"""The elements of users' data: the names of their features, their spec, and what is rejected."""

from collections.abc import Iterator, Sequence
import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import host_random
from ctl.data.autograph import convert, traced
from ctl.data.features import RESERVED, name_as_features
from ctl.data.source import (
    Augment,
    Augmented,
    Data,
    GlobalBatches,
    PerReplica,
    Source,
    dataset_of,
    source_of,
)
from ctl.errors import UsageError, type_name

# The stateful ops behind tf.random.uniform and similar functions, and behind tf.random.Generator.
# Their state is not in the checkpoint, so a resumed run would repeat or change their numbers. The op
# RandomIndexShuffle is stateless in spite of its name.
_STATEFUL = re.compile(
    "Random(?!IndexShuffle)|Rng|Multinomial|(Parameterized)?TruncatedNormal"
    "|Stateful(Random|Standard|Truncated|Uniform)"
)
_PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_IGNORE_STATE = 1  # tf.data's ExternalStatePolicy: export the graph without the state of its ops
# The transformations of tf.data that do not change the elements of a dataset.
_SAME_ELEMENTS = ("Cache", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take")
_SPLIT_ELEMENTS = ("FlatMap", "Interleave", "Unbatch", "Window")


def name_features(element: Any) -> Any:
    """Names the features of an element of a dataset.

    Args:
        element: a dict; or `(x, label)` or `(x, label, weight)`, where x is a tensor or a dict of
            features, and label a tensor or a dict of targets; or a named tuple. Its values are
            tensors, specs or the values of replicas.

    Returns:
        A dict, in which a feature of a tuple that is called "weight" is "x/weight"; anything but a
        tuple is returned as it is.

    Raises:
        UsageError: it is a tuple of another form.
    """
    if not isinstance(element, tuple):
        return element
    if hasattr(element, "_fields"):
        return dict(zip(element._fields, element, strict=True))
    x, *targets = element if element else [()]
    named = dict(zip(RESERVED, targets, strict=False))
    if any(getattr(value, "value_type", type(value)) is type(None) for value in targets):
        raise UsageError(
            "The elements of the data are tuples with None: leave out the None, such as (x, label)."
        )
    nested = any(isinstance(value, tuple | list) for value in element)
    nested |= isinstance(named.get("weight"), dict)
    if len(element) not in (2, 3) or nested:
        raise UsageError(
            f"The elements of the data are {element}, but must be dicts of tensors, or (x, label) or "
            "(x, label, weight) with one tensor or a dict of tensors as x and label: map them to "
            'dicts, such as {"x": ..., "label": ...}.'
        )
    return {**name_as_features(x if isinstance(x, dict) else {"x": x}), **named}


def name_dataset_features(data: Data) -> Data:
    """Names the features of every element of a dataset; a `Source` is returned as it is."""
    if isinstance(data, GlobalBatches | PerReplica):
        return dataclasses.replace(data, dataset=_name_elements(data.dataset))
    if isinstance(data, Augmented) and isinstance(data.data, tf.data.Dataset):
        return dataclasses.replace(data, data=_name_elements(data.data))
    return _name_elements(data) if isinstance(data, tf.data.Dataset) else data


def _name_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    spec = dataset.element_spec
    if not isinstance(spec, tuple):
        return dataset
    name_features(spec)  # reports an element that cannot be named before its values are read
    if hasattr(spec, "_fields"):  # tf.data does not unpack a named tuple
        return dataset.map(name_features)
    return dataset.map(lambda *values: name_features(values))


def check_data(data: Any, split: str) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch with an unknown number of rows.

    Raises:
        UsageError: `build_dataset` may not return this data for this split.
    """
    if not isinstance(data, Source | tf.data.Dataset | Augmented | GlobalBatches | PerReplica):
        raise UsageError(
            f"build_dataset({split!r}, ...) returned {type_name(data)}, but must return a "
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
            f"build_dataset({split!r}, ...) returned an empty dataset: at least one example is required."
        )
    spec = element_spec(data)
    if source is None and not isinstance(data, GlobalBatches | PerReplica):
        _check_single_examples(dataset_of(data))
    return spec


def _suggest_source(data: Any) -> str:
    """Names the function that makes a source of data of a common type, for a message."""
    if isinstance(data, Iterator):
        return ", such as ctl.data.generator(function)"
    if isinstance(data, dict | np.ndarray) or hasattr(data, "iloc"):
        return ", such as ctl.data.arrays(...)"
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):  # such as a Sequence of Keras
        return ", such as ctl.data.random_access(data), where data[i] is one example, not a batch"
    return ""


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
        spec, is_batched = _augmented_spec(data.augment, example), False
    elif isinstance(data, Source):
        # Traces `gather` without reading any example.
        gather = traced(data.gather)
        indexes = tf.TensorSpec([None], tf.int64)
        with host_random.checked_maps():
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


def without_python(data: Data, split: str) -> Data:
    """Returns data for an input pipeline on a remote host.

    A source that reads by Python, such as `ctl.data.records`, is replaced by one that uses TensorFlow
    ops alone (its method `without_python`).

    Args:
        data: what `build_dataset` returned.
        split: for the message.

    Raises:
        UsageError: the data still uses a Python function.
    """
    if isinstance(data, Augmented):
        data = Augmented(without_python(data.data, split), data.augment)
    elif isinstance(data, Source):
        data = data.without_python()
    # In a function a worker's dataset is being traced; it was checked before.
    used = [] if tf.inside_function() else python_ops(data)
    if used:
        raise UsageError(
            f"The {split} data calls a Python function ({used[0]}: tf.numpy_function, "
            "tf.py_function, from_generator or a Python package), which cannot run on the hosts of "
            "this strategy: use TensorFlow ops, or another runtime.strategy."
        )
    return data


def python_ops(data: Data) -> list[str]:
    """Returns the types of the ops by which data calls Python functions; empty without one."""
    source, augment = data, None
    if isinstance(data, Augmented):
        source, augment = data.data, convert(data.augment)
    seed = tf.zeros([2], tf.int64)
    if isinstance(source, Source):

        def read(indexes: tf.Tensor) -> Any:
            example = tf.nest.map_structure(lambda rows: rows[0], source.gather(indexes))
            return example if augment is None else augment(example, seed)

        # Not as a dataset, whose graph would contain the arrays of the source.
        function = traced(read).get_concrete_function(tf.TensorSpec([1], tf.int64))
        graph = function.graph.as_graph_def()
    else:
        dataset = dataset_of(source)
        if augment is not None:
            dataset = dataset.map(lambda example: augment(example, seed))
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_STATE
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    return sorted({node.op for node in _all_nodes(graph)} & _PYTHON_OPS)


def _augmented_spec(augment: Augment, example_spec: Any) -> Any:
    """Returns the spec of the examples that `augment` returns.

    Args:
        augment: the user's augmentation.
        example_spec: spec of the examples that it takes, without the batch axis.

    Raises:
        UsageError: the augmentation uses random numbers that do not come from its seed.
    """
    seed = tf.TensorSpec([2], tf.int64)
    with host_random.check(augment):
        function = tf.function(augment).get_concrete_function(example_spec, seed)
    for node in _all_nodes(function.graph.as_graph_def()):
        if _STATEFUL.match(node.op):
            raise UsageError(
                f"The augmentation uses {node.op}, whose values change after a restart: use a "
                "stateless function (tf.image.stateless_random_crop, tf.random.stateless_uniform) "
                "with the seed."
            )
    return tf.nest.map_structure(tf.TensorSpec.from_tensor, function.structured_outputs)


def _all_nodes(graph: Any) -> list[Any]:
    """Returns the nodes of a GraphDef, and those of its library: of branches, loops and maps."""
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


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
            "The elements of the data have features of variable length: return ctl.data.packed(source, "
            f"length) or ctl.data.bucketed(source, boundaries). They are {element!s:.300}."
        )
    is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None
    if not is_dense or spec.shape.rank < is_batched:
        batch_axis = " whose first axis is the batch axis" if is_batched else ""
        raise UsageError(
            f"The elements of the data must be dense tensors of known rank{batch_axis} "
            f"(tf.ensure_shape, tf.sparse.to_dense), but are {element!s:.300}."
        )
    shape = spec.shape.as_list()[is_batched:]
    if 0 in shape:  # tf.data's unbatch ends the process
        raise UsageError(
            "A feature of the data must have values: leave out those with an axis of length 0. The "
            f"elements are {element!s:.300}."
        )
    return tf.TensorSpec([None, *shape], spec.dtype)
