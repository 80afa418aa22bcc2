"""Finds Python functions in data, which input pipelines on remote hosts cannot call."""

import dataclasses
from typing import Any

import tensorflow as tf

from ctl.data.autograph import convert, traced
from ctl.data.elements import all_nodes
from ctl.data.kinds import Kind
from ctl.errors import UsageError

_PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_IGNORE_STATE = 1  # tf.data's ExternalStatePolicy: export the graph without the state of its ops


def without_python(data: Kind, split: str) -> Kind:
    """Returns data for an input pipeline on a remote host.

    A source that reads by Python, such as `ctl.data.records`, is replaced by one that uses TensorFlow
    ops alone (its method `without_python`).

    Args:
        data: what `build_dataset` returned.
        split: for the message.

    Raises:
        UsageError: the data still uses a Python function.
    """
    if data.source is not None:
        data = dataclasses.replace(data, source=data.source.without_python())
    # In a function a worker's dataset is being traced; it was checked before.
    used = [] if tf.inside_function() else python_ops(data)
    if used:
        raise UsageError(
            f"The {split} data calls a Python function ({used[0]}: tf.numpy_function, "
            "tf.py_function, from_generator or a Python package), which cannot run on the hosts of "
            "this strategy: use TensorFlow ops, or another runtime.strategy."
        )
    return data


def python_ops(data: Kind) -> list[str]:
    """Returns the types of the ops by which data calls Python functions; empty without one."""
    source, dataset = data.source, data.dataset
    augment = None if data.augment is None else convert(data.augment)
    seed = tf.zeros([2], tf.int64)
    if source is not None:

        def read(indexes: tf.Tensor) -> Any:
            example = tf.nest.map_structure(lambda rows: rows[0], source.gather(indexes))
            return example if augment is None else augment(example, seed)

        # Not as a dataset, whose graph would contain the arrays of the source.
        function = traced(read).get_concrete_function(tf.TensorSpec([1], tf.int64))
        graph = function.graph.as_graph_def()
    else:
        if augment is not None:
            dataset = dataset.map(lambda example: augment(example, seed))
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE_STATE
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    return sorted({node.op for node in all_nodes(graph)} & _PYTHON_OPS)
