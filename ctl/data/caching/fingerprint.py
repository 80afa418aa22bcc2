"""A name for the examples of a source, which changes if they may have changed."""

import hashlib
import json
from typing import Any

import tensorflow as tf

from ctl.data.source import Source

_VERSION = 1
# Attributes of operations that differ between processes, or name other functions.
_UNSTABLE = (
    "token",
    "metadata",
    "shared_name",
    "container",
    "config_proto",
    "experimental_debug_info",
)
_MAX_BYTES = 2**20  # of a captured tensor


def of_source(source: Source, spec: Any) -> str:
    """Returns the fingerprint of all examples of a source, 32 hexadecimal digits.

    It covers the paths, sizes and modification times of the files, the specs of the features, and the
    operations, constants and captured tensors of the functions that read and parse. It cannot cover
    what Python functions (`tf.numpy_function`) and lookup tables do.

    Args:
        source: the source; its `files` are the files of the examples.
        spec: the specs of an example.
    """
    files = []
    for path in source.files:
        status = tf.io.gfile.stat(path)
        files.append((path, status.length, status.mtime_nsec))
    # A cache in which records were replaced must not hide that a file is damaged.
    kind = [type(source).__name__, getattr(source, "skip_damaged", False)]
    content = [_VERSION, len(source), kind, files, _describe(spec), _trace(source)]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _describe(spec: Any) -> list[str]:
    return sorted(f"{name} {value.dtype.name} {value.shape}" for name, value in spec.items())


def _trace(source: Source) -> list[str]:
    """The operations that read and parse, in an order that does not depend on their names."""
    gather = tf.function(source.gather, autograph=False)
    traced = gather.get_concrete_function(tf.TensorSpec([None], tf.int64))
    graph = traced.graph.as_graph_def()
    nodes = [*graph.node, *(n for function in graph.library.function for n in function.node_def)]
    captured = [_value_of(tensor) for tensor in traced.captured_inputs]
    return sorted(_describe_node(node) for node in nodes) + captured


def _describe_node(node: Any) -> str:
    attributes = [
        f"{name}={value.SerializeToString(deterministic=True).hex()}"
        for name, value in sorted(node.attr.items())
        if name not in _UNSTABLE and not name.startswith("_") and not _names_function(value)
    ]
    return " ".join([node.op, *attributes])


def _names_function(value: Any) -> bool:
    return value.HasField("func") or bool(value.list.func)


def _value_of(tensor: tf.Tensor) -> str:
    if tensor.dtype in (tf.resource, tf.variant) or not hasattr(tensor, "numpy"):
        return tensor.dtype.name
    value = tensor.numpy()
    if value.nbytes > _MAX_BYTES:
        return f"{value.dtype} {value.shape}"
    content = repr(value.tolist()).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
