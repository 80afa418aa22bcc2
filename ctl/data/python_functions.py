"""Handles Python functions in input pipelines, which run only in the process that made them."""

from typing import Any

import tensorflow as tf

from ctl.data.autograph import convert
from ctl.data.source import Augmented, Data, Source, dataset_of
from ctl.errors import UsageError

_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_IGNORE_STATE = 1  # tf.data's ExternalStatePolicy: export the graph without the state of its ops


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
        examples, augment = without_python(data.data, split), data.augment
        seed = tf.zeros([2], tf.int64)
        dataset = _example_dataset(examples).map(lambda e: convert(augment)(e, seed))
        _check(dataset, split)
        return Augmented(examples, augment)
    if isinstance(data, Source):
        data = data.without_python()
    _check(_example_dataset(data), split)
    return data


def _example_dataset(data: Data) -> tf.data.Dataset:
    if not isinstance(data, Source):
        return dataset_of(data)
    rows = tf.data.Dataset.range(len(data)).batch(1).map(data.gather)
    return rows.unbatch()


def _check(dataset: tf.data.Dataset, split: str) -> None:
    if tf.inside_function():  # a worker's dataset is being traced; it was checked before
        return
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_STATE
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes: list[Any] = [*graph.node]
    for function in graph.library.function:
        nodes += function.node_def
    used = sorted({node.op for node in nodes} & _OPS)
    if used:
        raise UsageError(
            f"The {split} data calls a Python function ({used[0]}: tf.numpy_function, "
            "tf.py_function, from_generator or a Python package), which cannot run on the hosts of "
            "this strategy: use TensorFlow ops, or another runtime.strategy."
        )
