"""Sources of parsed examples in files that are mapped into memory."""

from collections.abc import Callable, Sequence
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.data.source import Batch, RowSource, Source
from ctl.errors import UsageError


class Feature(NamedTuple):
    """One feature of the cached examples.

    Attributes:
        name: the name of the feature.
        number: the number of the feature in the names of its files.
        examples: the number of examples.
        dtype: the name of the TensorFlow dtype.
        shape: the shape of one example; None for an axis whose length differs.
    """

    name: str
    number: int
    examples: int
    dtype: str
    shape: list[int | None]

    @property
    def values_file(self) -> str:
        """The file of the values of all examples, in order."""
        return f"{self.number}.values"

    @property
    def shapes_file(self) -> str:
        """The file of the [examples, rank] int64 shapes, if they differ."""
        return f"{self.number}.shapes"

    @property
    def is_ragged(self) -> bool:
        """Whether the examples may differ in their shapes."""
        return None in self.shape

    def encode(self, value: Any) -> bytes:
        """Returns the bytes of a value; each string follows its length."""
        if self.dtype != "string":
            return bytes(np.ascontiguousarray(value).tobytes())
        strings = np.asarray(value, object).reshape(-1).tolist()
        return b"".join(struct.pack("<q", len(string)) + string for string in strings)


class _OnThisHost(Source):
    def without_python(self) -> Source:
        """Raises UsageError: the files are on this host."""
        raise UsageError(
            "data.cache requires input pipelines in this process, but those of this strategy run on "
            "other hosts: set data.cache=''."
        )


class Cached(_OnThisHost):
    """Examples of one shape, whose files are mapped into memory; strings are read completely.

    Args:
        features: the features.
        path_of: returns the path of a file.
    """

    def __init__(self, features: Sequence[Feature], path_of: Callable[[str], str]):
        self._features = list(features)
        self._values = [_map_values(f, [f.examples, *_sizes(f)], path_of) for f in features]
        self.row_bytes = float(sum(v[:1].size * v.dtype.itemsize for v in self._values))

    def __len__(self) -> int:
        """The number of examples."""
        return self._features[0].examples

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads rows of every feature."""
        dtypes = [tf.as_dtype(f.dtype) for f in self._features]
        # NumPy copies the rows without the lock of Python's interpreter.
        values = tf.numpy_function(self._take, [indexes], dtypes, stateful=False)
        return {
            f.name: tf.ensure_shape(value, [*indexes.shape, *f.shape])
            for f, value in zip(self._features, tf.nest.flatten(values), strict=True)
        }

    def _take(self, indexes: np.ndarray) -> list[np.ndarray]:
        return [np.take(values, indexes, axis=0) for values in self._values]


class RaggedCached(_OnThisHost, RowSource):
    """Examples of different shapes; the arguments are as for `Cached`."""

    def __init__(self, features: Sequence[Feature], path_of: Callable[[str], str]):
        self._ragged = [f for f in features if f.is_ragged]
        self._shapes, self._ends, self._bytes = [], [], []
        for f in self._ragged:
            shape = (f.examples, len(f.shape))
            shapes = np.fromfile(path_of(f.shapes_file), "<i8", math.prod(shape)).reshape(shape)
            ends = np.cumsum(np.prod(shapes, axis=1)) * tf.as_dtype(f.dtype).size
            self._shapes.append(shapes)
            self._ends.append(np.concatenate([[0], ends]))
            self._bytes.append(np.memmap(path_of(f.values_file), np.uint8, "r"))
        others = [f for f in features if not f.is_ragged]
        self._others = Cached(others, path_of) if others else None
        self._count = features[0].examples
        self.row_bytes = float(sum(ends[-1] for ends in self._ends)) / self._count

    def __len__(self) -> int:
        """The number of examples."""
        return self._count

    def read(self, indexes: tf.Tensor) -> dict[str, Any]:
        """Reads the bytes and the shapes of ragged features, and the values of the others."""
        count = len(self._ragged)
        dtypes = [tf.string] * count + [tf.int64] * count
        parts = tf.numpy_function(self._slice, [indexes], dtypes, stateful=False)
        rows: dict[str, Any] = self._others.gather(indexes) if self._others else {}
        for f, content, shape in zip(self._ragged, parts[:count], parts[count:], strict=True):
            content = tf.ensure_shape(content, indexes.shape)
            rows[f.name] = (content, tf.ensure_shape(shape, [*indexes.shape, len(f.shape)]))
        return rows

    def parse(self, row: dict[str, Any]) -> Batch:
        """Makes an example of one row of `read`."""
        example = dict(row)
        for f in self._ragged:
            content, shape = row[f.name]
            dtype = tf.as_dtype(f.dtype)
            raw = tf.io.decode_raw(content, _RAW.get(dtype, dtype))
            values = raw if raw.dtype == dtype else tf.bitcast(raw, dtype)
            example[f.name] = tf.ensure_shape(tf.reshape(values, shape), f.shape)
        return example

    def _slice(self, indexes: np.ndarray) -> list[np.ndarray]:
        contents, rows = [], indexes.tolist()
        for values, ends in zip(self._bytes, self._ends, strict=True):
            slices = [values[ends[row] : ends[row + 1]].tobytes() for row in rows]
            contents.append(np.array(slices, object))
        return [*contents, *(shapes[indexes] for shapes in self._shapes)]


# Types that decode_raw does not support -> supported types of the same size.
_RAW = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def _sizes(feature: Feature) -> list[int]:
    return [size or 0 for size in feature.shape]


def _map_values(feature: Feature, shape: list[int], path_of: Callable[[str], str]) -> np.ndarray:
    path, dtype = path_of(feature.values_file), tf.as_dtype(feature.dtype)
    if dtype != tf.string:
        return np.memmap(path, dtype.as_numpy_dtype, "r", shape=tuple(shape))
    strings, place = [], 0
    with open(path, "rb") as file:
        content = file.read()
    for _ in range(math.prod(shape)):
        (length,) = struct.unpack_from("<q", content, place)
        strings.append(content[place + 8 : place + 8 + length])
        place += 8 + length
    return np.array(strings, object).reshape(shape)
