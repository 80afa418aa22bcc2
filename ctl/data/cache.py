"""Caches parsed examples in memory or in a folder, so that they are read and parsed only once.

A cache in a folder is a subfolder, named by a fingerprint of the examples: the files and their sizes
and modification times, the specs of the features, and the operations of the parse function. It is
written under another name and renamed when it is complete, so that the incomplete cache of a killed
process is never read.

A feature whose examples have one shape is a file of all values, or of all strings and a file of their
lengths. Any other feature is a file of one serialized tensor per example. In memory, the same bytes are
in buffers.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from typing import Any, BinaryIO, NamedTuple
import uuid

import filelock
import numpy as np
import tensorflow as tf

from ctl.data import batching, fingerprint, ragged
from ctl.data.data_errors import find_unreadable, report_data_errors
from ctl.data.distribution import disable_autotune
from ctl.data.features import flat_names, flatten_features
from ctl.data.source import (
    Arrays,
    Augmented,
    Batch,
    Data,
    GlobalBatches,
    PerReplica,
    RowSource,
    Source,
)
from ctl.errors import UsageError, check_local

MEMORY = "memory"
_META = "features.json"
_ROWS = 256  # examples that are written at a time
_PROGRESS_SECONDS = 5.0


class Feature(NamedTuple):
    """One feature of the cached examples.

    Attributes:
        name: the name of the feature.
        file: the file of its values or strings; the file of the lengths is "<file>.lengths".
        dtype: the name of the TensorFlow dtype.
        shape: the shape of one example; None for an axis whose length differs.
    """

    name: str
    file: str
    dtype: str
    shape: list[Any]

    @property
    def is_ragged(self) -> bool:
        """Whether the examples may differ in their shapes."""
        return None in self.shape

    @property
    def has_lengths(self) -> bool:
        """Whether the file has strings: those of the examples, or their serialized tensors."""
        return self.is_ragged or self.dtype == "string"

    def encode(self, value: tf.Tensor) -> list[bytes]:
        """Returns the strings of one example or several, or the bytes of their numbers."""
        if self.is_ragged:
            return [tf.io.serialize_tensor(value).numpy()]
        values = value.numpy()
        if self.dtype == "string":
            return np.asarray(values, object).reshape(-1).tolist()
        return [np.ascontiguousarray(values).tobytes()]


class _CachedFeatures(Source):
    """The features of examples in buffers.

    Args:
        spec: the specs of an example.
        count: the number of examples.
        features: the features, in the order of `tf.nest.flatten`.
        buffer_of: returns the bytes of a file.
    """

    def __init__(
        self,
        spec: Any,
        count: int,
        features: Sequence[Feature],
        buffer_of: Callable[[str], np.ndarray],
    ):
        self._count = count
        self._spec = spec
        self._features = features
        buffers = {f.name: buffer_of(f.file) for f in features}
        self.row_bytes = sum(buffer.size for buffer in buffers.values()) / count
        self._readers = [_reader(f, count, buffers[f.name], buffer_of) for f in features]

    def __len__(self) -> int:
        """The number of examples."""
        return self._count

    def without_python(self) -> Source:
        """Raises UsageError: the files are on this host."""
        raise UsageError(
            "data.cache requires input pipelines in this process, but those of this strategy run on "
            "other hosts: set data.cache=''."
        )

    def _read(self, indexes: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads rows of every feature; a feature of different shapes has serialized tensors."""
        types = [tf.string if f.is_ragged else tf.as_dtype(f.dtype) for f in self._features]
        # NumPy copies the rows without the lock of Python's interpreter.
        read = lambda rows: [reader(rows) for reader in self._readers]  # noqa: E731
        values = tf.nest.flatten(tf.numpy_function(read, [indexes], types, stateful=False))
        shapes = [[] if f.is_ragged else f.shape for f in self._features]
        return {
            f.name: tf.ensure_shape(value, [*indexes.shape, *shape])
            for f, value, shape in zip(self._features, values, shapes, strict=True)
        }


class Cached(_CachedFeatures):
    """Examples of one shape."""

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads rows of every feature."""
        return tf.nest.pack_sequence_as(self._spec, [*self._read(indexes).values()])


class RaggedCached(_CachedFeatures, RowSource):
    """Examples of different shapes."""

    def read(self, indexes: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the values, and the serialized tensors of features of different shapes."""
        return self._read(indexes)

    def parse(self, row: dict[str, tf.Tensor]) -> Batch:
        """Makes an example of one row of `read`."""
        parsed = {
            f.name: tf.ensure_shape(tf.io.parse_tensor(row[f.name], f.dtype), f.shape)
            for f in self._features
            if f.is_ragged
        }
        values = {**row, **parsed}
        return tf.nest.pack_sequence_as(self._spec, [values[f.name] for f in self._features])


def _reader(
    feature: Feature, count: int, buffer: np.ndarray, buffer_of: Callable[[str], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that reads the rows of a feature."""
    if not feature.has_lengths:
        values = buffer.view(tf.as_dtype(feature.dtype).as_numpy_dtype).reshape(
            [count, *feature.shape]
        )
        return lambda rows: np.take(values, rows, axis=0)
    shape = [] if feature.is_ragged else feature.shape
    ends = np.concatenate([[0], np.cumsum(buffer_of(f"{feature.file}.lengths").view(np.int64))])
    size = math.prod(shape)  # strings of an example

    def read(rows: np.ndarray) -> np.ndarray:
        numbers = (rows[:, None] * size + np.arange(size)).reshape(-1).tolist()
        strings = np.empty(len(numbers), object)
        strings[:] = [buffer[ends[i] : ends[i + 1]].tobytes() for i in numbers]
        return strings.reshape([len(rows), *shape])

    return read


def cached(source: Source, place: str) -> Source:
    """Returns a source of the same examples, which are read and parsed only once.

        ctl.data.cached(ctl.data.image_folder("flowers/train"), self.options.cache)

    `data.cache` does this for all data, except for the sources inside of a `ctl.data.mixture`.

    Args:
        source: the examples, dense tensors of known rank. Sources in memory (`ctl.data.arrays` and
            `ctl.data.sequences`) are returned unchanged. `ctl.data.mixture`, `ctl.data.bucketed`
            and, in a folder, `ctl.data.packed` are not supported: wrap each of their sources.
        place: "memory"; a folder on a local disk, which several processes and runs may share; or "",
            which returns the source itself.

    Raises:
        UsageError: the examples cannot be kept, or the folder cannot be written.
    """
    check_local("data.cache", place)
    if not place or isinstance(source, Arrays | ragged.Sequences | Cached | RaggedCached):
        return source  # is in memory
    if source.has_own_order:
        raise UsageError(
            f"data.cache does not support {type(source).__name__}: set data.cache='' and give it "
            "ctl.data.cached(source, place) of each of its sources."
        )
    examples = batching.all_examples(source)
    _check_spec(examples.element_spec)
    if place == MEMORY:
        return _fill_memory(source, examples)
    if not source.files:
        raise UsageError(
            f"data.cache={place} requires a source that names its files, but {type(source).__name__} "
            "has no attribute `files`: set it, or set data.cache=memory."
        )
    return _load_or_fill(source, examples, place)


def cache_data(data: Data, place: str) -> Data:
    """Applies `data.cache` to what `build_dataset` returned.

    Raises:
        UsageError: the data is not a source.
    """
    if isinstance(data, Augmented):
        return Augmented(cache_data(data.data, place), data.augment)
    if isinstance(data, Source):
        return cached(data, place)
    if not isinstance(data, tf.data.Dataset | GlobalBatches | PerReplica):
        return data  # the input pipeline rejects it
    raise UsageError(
        f"data.cache requires a ctl.data.Source, but build_dataset returned {type(data).__name__}: "
        "set data.cache='' and call cache() on the dataset."
    )


def _check_spec(spec: Any) -> None:
    for name, feature in flatten_features(spec).items():
        is_dense = isinstance(feature, tf.TensorSpec) and feature.shape.rank is not None
        if not is_dense or 0 in feature.shape.as_list():
            raise UsageError(
                f"data.cache requires dense tensors of known rank with values, but {name!r} is "
                f"{feature}: convert it in the parse function (tf.sparse.to_dense, tf.ensure_shape), or "
                "set data.cache=''."
            )


def _fill_memory(source: Source, examples: tf.data.Dataset) -> Source:
    files: defaultdict[str, io.BytesIO] = defaultdict(io.BytesIO)
    features = _write(source, examples, files.__getitem__)
    return _load(
        source,
        examples.element_spec,
        features,
        lambda name: np.frombuffer(files[name].getbuffer(), np.uint8),
    )


def _load_or_fill(source: Source, examples: tf.data.Dataset, folder: str) -> Source:
    name = fingerprint.of_source(source, examples.element_spec)
    final = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        # One process of this machine fills a cache while the others wait; its exit frees the lock.
        with filelock.FileLock(f"{final}.lock"):
            if not os.path.exists(os.path.join(final, _META)):
                for other in os.listdir(folder):  # of processes that were killed in this
                    if other.startswith(f"{name}.") and other.endswith(".tmp"):
                        shutil.rmtree(os.path.join(folder, other), ignore_errors=True)
                _fill_folder(source, examples, final)
    except OSError as error:
        raise UsageError(
            f"data.cache={folder} cannot be written ({error.strerror}): choose a folder on a local disk "
            "with more space, or data.cache=memory."
        ) from None
    with open(os.path.join(final, _META)) as file:
        features = [Feature(**feature) for feature in json.load(file)]

    def buffer_of(name: str) -> np.ndarray:
        path = os.path.join(final, name)
        # A file without content cannot be mapped into memory.
        return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.zeros(0, np.uint8)

    return _load(source, examples.element_spec, features, buffer_of)


def _fill_folder(source: Source, examples: tf.data.Dataset, final: str) -> None:
    temporary = f"{final}.{uuid.uuid4().hex}.tmp"
    os.makedirs(temporary)
    try:
        with contextlib.ExitStack() as stack:

            def open_file(name: str) -> BinaryIO:
                return stack.enter_context(open(os.path.join(temporary, name), "wb"))

            features = _write(source, examples, open_file)
            with open(os.path.join(temporary, _META), "w") as file:
                json.dump([feature._asdict() for feature in features], file)
        os.sync()  # so that a power failure cannot leave a renamed but incomplete cache
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    source: Source, examples: tf.data.Dataset, open_file: Callable[[str], BinaryIO]
) -> list[Feature]:
    """Writes all examples into the files of their features."""
    specs, count = examples.element_spec, len(source)
    flat = zip(flat_names(specs), tf.nest.flatten(specs), strict=True)
    features = [
        Feature(name, str(number), spec.dtype.name, spec.shape.as_list())
        for number, (name, spec) in enumerate(flat)
    ]
    files = {f.name: open_file(f.file) for f in features}
    lengths = {f.name: open_file(f"{f.file}.lengths") for f in features if f.has_lengths}
    is_ragged = any(feature.is_ragged for feature in features)
    elements = examples.prefetch(_ROWS) if is_ragged else examples.batch(_ROWS)
    begin = shown = time.monotonic()
    done = 0
    with report_data_errors(
        "cached",
        lambda: elements.element_spec,
        lambda: find_unreadable(source, range(done, done + _ROWS)),
    ):
        for element in disable_autotune(elements):
            values = tf.nest.flatten(element)
            for feature, value in zip(features, values, strict=True):
                for content in feature.encode(value):
                    files[feature.name].write(content)
                    if feature.has_lengths:
                        lengths[feature.name].write(np.int64(len(content)).tobytes())
            done += 1 if is_ragged else len(values[0])
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                line = f"Filling the cache: {done:,} of {count:,} examples, {shown - begin:.0f} s"
                print(line, file=sys.stderr, flush=True)
    if done != count:
        raise UsageError(f"The data has {count} examples, but only {done} of them could be read.")
    return features


def _load(
    source: Source,
    spec: Any,
    features: Sequence[Feature],
    buffer_of: Callable[[str], np.ndarray],
) -> Source:
    kind = RaggedCached if any(feature.is_ragged for feature in features) else Cached
    result = kind(spec, len(source), features, buffer_of)
    result.inner_sources = (source,)
    for name in ("order", "evaluation_order"):
        if getattr(type(source), name) is not getattr(Source, name):  # the user's own
            setattr(result, name, getattr(source, name))
    return result
