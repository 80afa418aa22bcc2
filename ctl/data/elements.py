"""The elements of users' data: the names of their features, their spec, and what is rejected."""

import re
from typing import Any

import tensorflow as tf

from ctl.data import host_random
from ctl.data.autograph import traced
from ctl.data.features import RESERVED, check_names, name_as_features
from ctl.data.source import Augment, Nest, Source
from ctl.errors import UsageError

# The stateful ops behind tf.random.uniform and similar functions, and behind tf.random.Generator.
# Their state is not in the checkpoint, so a resumed run would repeat or change their numbers. The op
# RandomIndexShuffle is stateless in spite of its name.
_STATEFUL = re.compile(
    "Random(?!IndexShuffle)|Rng|Multinomial|(Parameterized)?TruncatedNormal"
    "|Stateful(Random|Standard|Truncated|Uniform)"
)
# The transformations of tf.data that do not change the elements of a dataset.
_SAME_ELEMENTS = ("Cache", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take")
_SPLIT_ELEMENTS = ("FlatMap", "Interleave", "Unbatch", "Window")


def name_features(element: Nest) -> Any:
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


def name_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Names the features of every element of a dataset."""
    spec = dataset.element_spec
    if not isinstance(spec, tuple):
        return dataset
    name_features(spec)  # reports an element that cannot be named before its values are read
    if hasattr(spec, "_fields"):  # tf.data does not unpack a named tuple
        return dataset.map(name_features)
    return dataset.map(lambda *values: name_features(values))


def source_spec(source: Source) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch of a source; traces `gather` without reading any example."""
    gather = traced(source.gather)
    with host_random.checked_maps():
        outputs = gather.get_concrete_function(tf.TensorSpec([None], tf.int64)).structured_outputs
    return batch_spec(tf.nest.map_structure(tf.type_spec_from_value, outputs), is_batched=True)


def batch_spec(spec: Nest, *, is_batched: bool) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch with an unknown number of rows, for building the model.

    Args:
        spec: the spec of an element.
        is_batched: whether the element is a batch, and not an example.

    Raises:
        UsageError: the elements are not dicts of tensors of known rank.
    """
    if not isinstance(spec, dict) or not spec:
        raise UsageError(
            f"The elements of the data are {spec}, but must be dicts, such as "
            '{"x": ..., "label": ...}, or (x, label) or (x, label, weight) of a dataset.'
        )
    check_names(spec)
    return tf.nest.map_structure(lambda s: _feature_spec(s, is_batched, spec), spec)


def augmented_spec(augment: Augment, spec: dict[str, tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    """Returns the spec of a batch of the examples that `augment` returns.

    Args:
        augment: the user's augmentation, which takes examples without the batch axis.
        spec: the spec of a batch of the examples that it takes.

    Raises:
        UsageError: the augmentation uses random numbers that do not come from its seed.
    """
    example_spec = tf.nest.map_structure(lambda s: tf.TensorSpec(s.shape[1:], s.dtype), spec)
    seed = tf.TensorSpec([2], tf.int64)
    with host_random.check(augment):
        function = tf.function(augment).get_concrete_function(example_spec, seed)
    for node in all_nodes(function.graph.as_graph_def()):
        if _STATEFUL.match(node.op):
            raise UsageError(
                f"The augmentation uses {node.op}, whose values change after a restart: use a "
                "stateless function (tf.image.stateless_random_crop, tf.random.stateless_uniform) "
                "with the seed."
            )
    outputs = tf.nest.map_structure(tf.TensorSpec.from_tensor, function.structured_outputs)
    return batch_spec(outputs, is_batched=False)


def all_nodes(graph: tf.Graph) -> list[Any]:
    """Returns the nodes of a GraphDef, and those of its library: of branches, loops and maps."""
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def check_single_examples(dataset: tf.data.Dataset) -> None:
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
            shapes = " and ".join(str(tuple(spec.shape)) for spec in specs)
            raise UsageError(
                f"The elements of the data are batches, {shapes}, but must be single "
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


def _feature_spec(spec: Nest, is_batched: bool, element: Nest) -> tf.TensorSpec:
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
