"""Computes a fingerprint of a source's examples, which changes if they may have changed."""

import hashlib
import json
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.data.features import flat_names, flatten_features
from ctl.data.files import record_index
from ctl.data.source import Source

_VERSION = 3  # of the files of a cache
# Attributes of operations that differ between processes.
_UNSTABLE = (
    "token",
    "metadata",
    "shared_name",
    "container",
    "config_proto",
    "experimental_debug_info",
)


def of_source(source: Source, spec: Any) -> str:
    """Returns the fingerprint of all examples of a source, 32 hexadecimal digits.

    It covers the paths, sizes and modification times of the files, the specs of the features, and the
    functions that read and parse: their operations in order, with all inputs, constants, and the
    values of captured tensors and variables. It does not depend on names that TensorFlow generates,
    so the same code has the same fingerprint in every process.

    It cannot cover what Python functions (`tf.numpy_function`) do, nor the content of captured
    resources and variants other than variables, such as lookup tables and datasets.

    Args:
        source: the source; its `files` are the files of the examples.
        spec: the specs of an example.
    """
    files = []
    for path in source.files:
        files.append((path, *_stat(path)))
    # A cache in which records were replaced must not hide that a file is damaged.
    kind = [type(source).__name__, getattr(source, "skip_damaged", False)]
    return _digest([_VERSION, len(source), kind, files, _describe(spec), _trace(source)])


def _stat(path: str) -> tuple[int, int]:
    """Returns the size of a file, and a number that differs once it has changed."""
    try:
        status = tf.io.gfile.stat(path)
    except tf.errors.UnimplementedError:  # a URL of a scheme that only fsspec can open
        return record_index.stat(path)
    return status.length, status.mtime_nsec


def _describe(spec: Any) -> list[str]:
    features = flatten_features(spec).items()
    return sorted(f"{name} {value.dtype.name} {value.shape}" for name, value in features)


def _trace(source: Source) -> list[Any]:
    """Returns the features, the digest of the function that reads them, and its captured values."""
    gather = traced(source.gather)
    trace = gather.get_concrete_function(tf.TensorSpec([None], tf.int64))
    library = trace.graph.as_graph_def().library.function
    functions = _Functions({function.signature.name: function for function in library})
    variables = {id(variable.handle): variable for variable in trace.graph.variables}
    captured = [_digest_value(variables.get(id(t), t)) for t in trace.captured_inputs]
    # The outputs of the function are in the order of the sorted names.
    return [
        flat_names(trace.structured_outputs),
        functions.digest(trace.function_def),
        captured,
    ]


class _Functions:
    """Computes digests of functions that do not depend on the names of nodes and functions."""

    def __init__(self, library: dict[str, Any]):
        self._library = library
        self._digests: dict[str, str] = {}

    def digest(self, function: Any) -> str:
        """Returns the digest of a FunctionDef."""
        signature = function.signature
        names = [*(arg.name for arg in signature.input_arg), *(n.name for n in function.node_def)]
        positions = {name: str(position) for position, name in enumerate(names)}
        nodes = [self._describe_node(node, positions) for node in function.node_def]
        outputs = [_place(function.ret[arg.name], positions) for arg in signature.output_arg]
        # TensorFlow collects these in sets, whose order differs between processes.
        control_outputs = sorted(_place(name, positions) for name in function.control_ret.values())
        types = [arg.type for arg in signature.input_arg]
        return _digest([types, nodes, outputs, control_outputs])

    def _digest_name(self, name: str) -> str:
        if name not in self._library:
            return name
        if name not in self._digests:
            self._digests[name] = "recursive"  # in the digest of a function that calls itself
            self._digests[name] = self.digest(self._library[name])
        return self._digests[name]

    def _describe_node(self, node: Any, positions: dict[str, str]) -> list[Any]:
        inputs = [_place(name, positions) for name in node.input]
        control_inputs = sorted(place for place in inputs if place.startswith("^"))
        data_inputs = [place for place in inputs if not place.startswith("^")]
        attributes = self._describe_attributes(node.attr)
        return [self._digest_name(node.op), attributes, data_inputs, control_inputs]

    def _describe_attributes(self, attributes: Any) -> list[Any]:
        return [
            [name, self._describe_attribute(value)]
            for name, value in sorted(attributes.items())
            if name not in _UNSTABLE and not name.startswith("_")
        ]

    def _describe_attribute(self, value: Any) -> Any:
        called = [value.func] if value.HasField("func") else value.list.func
        if called:
            return [[self._digest_name(f.name), self._describe_attributes(f.attr)] for f in called]
        # A constant may be large.
        return hashlib.blake2b(value.SerializeToString(deterministic=True)).hexdigest()


def _place(name: str, positions: dict[str, str]) -> str:
    """Replaces the name of the node in `node:output:0`, `argument` or `^node` by its position."""
    control = "^" if name.startswith("^") else ""
    node, *output = name.removeprefix("^").split(":")
    return control + ":".join([positions[node], *output])


def _digest_value(value: tf.Tensor | tf.Variable) -> str:
    """Returns the digest of a captured value, or its type if it cannot be read."""
    if value.dtype in (tf.resource, tf.variant) or not hasattr(value, "numpy"):
        return value.dtype.name
    content = hashlib.blake2b(f"{value.dtype.name} {value.shape}".encode())
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype == tf.string:
        for string in tf.reshape(tensor, [-1]).numpy():
            content.update(b"%d " % len(string) + string)
    else:
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


def _digest(content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
