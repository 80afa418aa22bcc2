"""Saves objects with `state_dict` and `load_state_dict`, such as replay buffers, in checkpoints."""

from collections.abc import Mapping
import io
import json
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError, type_name

_NUMPY = np.ndarray | np.generic | tf.Tensor | tf.Variable


class StateDict(tf.train.experimental.PythonState):
    """The state of an object as an entry of a checkpoint, which is matched like a variable.

    The entry is an archive of NumPy with JSON, so that restoring a checkpoint runs no code of it.

    Args:
        name: the name of the object in messages.
        owner: the object.

    Attributes:
        name: as the argument.
        shape: that of the entry.
        dtype: that of the entry.
    """

    shape, dtype = (), tf.string

    def __init__(self, name: str, owner: Any):
        self.name = name
        self._owner = owner
        self._value: bytes | None = None

    def freeze(self) -> None:
        """Copies the state for `serialize`, which a thread may call while training continues."""
        self._value = self._pack()

    def serialize(self) -> bytes:
        """Returns the state, that of the last `freeze` if there is one."""
        return self._pack() if self._value is None else self._value

    def deserialize(self, string_value: bytes) -> None:
        """Passes a saved state to the object."""
        with np.load(io.BytesIO(string_value), allow_pickle=False) as saved:
            arrays = dict(saved)
        tree = json.loads(arrays.pop("tree").tobytes())
        self._owner.load_state_dict(_join(tree, arrays))

    assign = deserialize

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Copies nothing, because TensorFlow would only do it at the first save; see `freeze`."""

    def _pack(self) -> bytes:
        arrays: dict[str, Any] = {}
        tree = json.dumps(self._split(self._owner.state_dict(), arrays))
        file = io.BytesIO()
        np.savez(file, **arrays, tree=np.frombuffer(tree.encode(), np.uint8))
        return file.getvalue()

    def _split(self, value: Any, arrays: dict[str, np.ndarray]) -> Any:
        """Returns the structure of a state in JSON types, and adds its arrays."""
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self._split(each, arrays) for key, each in value.items()}}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self._split(each, arrays) for each in value]}
        # V: bfloat16, which a file of NumPy does not name, and structured arrays.
        if isinstance(value, _NUMPY) and (array := np.asarray(value)).dtype.kind not in "OV":
            arrays[name := f"array{len(arrays)}"] = array
            return {"array": name}
        if value is None or type(value) in (bool, int, float, str):
            return {"value": value}
        raise UsageError(
            f"{self.name}.state_dict() contains {type_name(value)}, which a checkpoint cannot hold: "
            "return dicts with texts as keys, lists, tuples, arrays of numbers, numbers, texts and None."
        )


def _join(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    ((kind, value),) = tree.items()
    if kind == "dict":
        return {key: _join(each, arrays) for key, each in value.items()}
    if kind in ("list", "tuple"):
        values = [_join(each, arrays) for each in value]
        return values if kind == "list" else tuple(values)
    return arrays[value] if kind == "array" else value
