"""Caches parsed examples in memory or in a folder, so that they are read and parsed only once.

In memory, examples are arrays of one shape. In a folder, each example is a record, the serialized
tensors of its features, in an ArrayRecord file that is named by a digest of the source's files and
version. It is written under another name and renamed when it is complete, so that the incomplete file of
a killed process is never read.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import os
import pathlib
from typing import Any

import filelock
import numpy as np
import tensorflow as tf

from ctl.data import batching
from ctl.data.data_errors import find_unreadable, report_data_errors
from ctl.data.distribution import disable_autotune
from ctl.data.features import flatten_features
from ctl.data.files import record_index
from ctl.data.files.record_reader import ArrayRecordReader, import_package
from ctl.data.files.records import RecordFeatures, Records
from ctl.data.kinds import Kind
from ctl.data.ragged import Sequences
from ctl.data.source import Arrays, Batch, Nest, Source
from ctl.errors import Failure, UsageError, check_local, print_line
from ctl.hardware.file_systems import create

MEMORY = "memory"
_FORMAT = 4  # of the records
_ROWS = 256  # examples that are read at a time


class _CachedSource(Source):
    """A copy of the examples of another source, `inner_sources[0]`, in the same order."""

    def order(self, positions: tf.Tensor, *, seed: int, span: int) -> tf.Tensor:
        """Returns the order of the source, which may be the user's own."""
        return self.inner_sources[0].order(positions, seed=seed, span=span)

    def evaluation_order(self, positions: tf.Tensor, *, batch_size: int) -> tf.Tensor:
        """Returns the order of the source."""
        return self.inner_sources[0].evaluation_order(positions, batch_size=batch_size)


class CachedArrays(_CachedSource, Arrays):
    """Examples of one shape in memory."""


class CachedRecords(_CachedSource, Records):
    """Examples as records in a file."""

    def without_python(self) -> Source:
        """Raises UsageError: the records are on this host."""
        raise UsageError(
            "data.cache requires input pipelines in this process, but those of this strategy run on "
            "other hosts: set data.cache=''."
        )


def cached(source: Source, place: str) -> Source:
    """Returns a source of the same examples, which are read and parsed only once.

        photos = ctl.data.records("photos/*.tfrecord", parse, version="1")
        ctl.data.cached(photos, self.options.cache)

    `data.cache` does this for all data, except for the sources inside of a `ctl.data.mixture`.

    Args:
        source: the examples, dense tensors of known rank. Sources in memory (`ctl.data.arrays` and
            `ctl.data.sequences`) are returned unchanged. `ctl.data.mixture`, `ctl.data.bucketed`
            and, in a folder, `ctl.data.packed` are not supported: wrap each of their sources.
        place: "memory", for examples of one shape; a folder on a local disk, which several processes
            and runs may share; or "", which returns the source itself. A folder requires the package
            array-record, and a source with `files` and a `version`.

    Raises:
        UsageError: the examples cannot be kept, or the folder cannot be written.
    """
    check_local("data.cache", place)
    if not place or isinstance(source, Arrays | Sequences | _CachedSource):
        return source  # is in memory
    if source.has_own_order:
        raise UsageError(
            f"data.cache does not support {type(source).__name__}: set data.cache='' and give it "
            "ctl.data.cached(source, place) of each of its sources."
        )
    examples = batching.all_examples(source)
    _check_spec(examples.element_spec, place)
    if place == MEMORY:
        batches = _read(source, examples, examples)
        copy: Source = CachedArrays(tf.nest.map_structure(lambda *v: np.concatenate(v), *batches))
    else:
        copy = CachedRecords(_load_or_fill(source, examples, place), _parser(examples.element_spec))
    # The order of the copy must not read ahead in the files.
    is_read = isinstance(source, Records | RecordFeatures)
    copy.inner_sources = (source.without_python() if is_read else source,)
    return copy


def cache_data(data: Kind, place: str) -> Kind:
    """Applies `data.cache` to the data of a split.

    Raises:
        UsageError: the data is not a source.
    """
    if data.source is None:
        raise UsageError(
            f"data.cache requires a ctl.data.Source, but build_dataset returned {data.name}: set "
            "data.cache='' and call cache() on the dataset."
        )
    return dataclasses.replace(data, source=cached(data.source, place))


def _check_spec(spec: Nest, place: str) -> None:
    shapes = "one shape" if place == MEMORY else "known rank"
    for name, feature in flatten_features(spec).items():
        is_dense = isinstance(feature, tf.TensorSpec) and feature.shape.rank is not None
        sizes = feature.shape.as_list() if is_dense else [0]
        if 0 in sizes or (None in sizes and place == MEMORY):
            raise UsageError(
                f"data.cache={place} requires dense tensors of {shapes} with values, but {name!r} is "
                f"{feature}: convert it in the parse function (tf.sparse.to_dense, tf.image.resize), "
                "set data.cache to a folder, which holds tensors of any known rank, or data.cache=''."
            )


def _serialize(example: Batch) -> tf.Tensor:
    """Returns the record of an example."""
    features = [tf.io.serialize_tensor(value) for value in tf.nest.flatten(example)]
    return tf.io.serialize_tensor(tf.stack(features))


def _parser(spec: Nest) -> Callable[[tf.Tensor], Batch]:
    """Returns a function from the record of an example to the example."""

    def parse(record: tf.Tensor) -> Batch:
        specs = tf.nest.flatten(spec)
        features = tf.unstack(tf.io.parse_tensor(record, tf.string), len(specs))
        values = [tf.io.parse_tensor(f, s.dtype) for s, f in zip(specs, features, strict=True)]
        values = [tf.ensure_shape(v, s.shape) for s, v in zip(specs, values, strict=True)]
        return tf.nest.pack_sequence_as(spec, values)

    return parse


def _read(source: Source, examples: tf.data.Dataset, rows: tf.data.Dataset) -> Iterator[Any]:
    """Yields all rows, which are the examples or their records, in batches of arrays."""
    count, done = len(source), 0
    print_line(f"Filling data.cache with {count:,} examples.")
    with report_data_errors(
        "cached",
        lambda: examples.batch(1).element_spec,
        lambda: find_unreadable(source, range(done, done + _ROWS)),
    ):
        for batch in disable_autotune(rows.batch(_ROWS)):
            yield tf.nest.map_structure(lambda value: value.numpy(), batch)
            done += len(tf.nest.flatten(batch)[0])
    if done != count:
        raise UsageError(f"The data has {count} examples, but only {done} of them could be read.")


def _load_or_fill(source: Source, examples: tf.data.Dataset, folder: str) -> ArrayRecordReader:
    if not source.files or source.version is None:
        raise UsageError(
            f"data.cache={folder} requires the files that the examples come from, and a version of the "
            f"functions that read them, but {type(source).__name__} lacks `files` or `version`: set "
            'both (ctl.data.records(files, parse, version="1")), and another version after each change, '
            "or set data.cache=memory."
        )
    import_package()
    path = os.path.join(folder, f"{_digest(source, examples.element_spec)}.array_record")
    try:
        os.makedirs(folder, exist_ok=True)
        # One process of this machine fills a cache while the others wait; its exit frees the lock.
        with filelock.FileLock(f"{path}.lock"):
            if not os.path.exists(path):
                _fill(source, examples, path)
    except (OSError, RuntimeError) as error:  # array-record raises a RuntimeError
        if isinstance(error, Failure):
            raise
        problem = getattr(error, "strerror", None) or str(error).partition(";")[0]
        raise UsageError(
            f"data.cache={folder} cannot be written ({problem}): choose a folder on a local disk "
            "with more space, or data.cache=memory."
        ) from None
    return ArrayRecordReader([path], skip_damaged=False)


def _fill(source: Source, examples: tf.data.Dataset, path: str) -> None:
    temporary = f"{path}.incomplete"  # may be that of a killed process
    try:
        create(pathlib.Path(temporary)).close()
        # Groups of one record are the fastest to read in random order.
        writer = import_package().ArrayRecordWriter(temporary, "group_size:1,uncompressed")
        with contextlib.closing(writer):
            for records in _read(source, examples, examples.map(_serialize, **batching.PARALLEL)):
                for record in records:
                    writer.write(record)
        os.sync()  # so that a power failure cannot leave a renamed but incomplete file
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def _digest(source: Source, spec: Nest) -> str:
    """Returns a digest of what the examples depend on: files, version and specs."""
    features = [f"{n} {s.dtype.name} {s.shape}" for n, s in flatten_features(spec).items()]
    # A cache in which records were replaced must not hide that a file is damaged.
    kind = [type(source).__name__, getattr(source, "skip_damaged", False), len(source)]
    files = [(path, *record_index.stat(path)) for path in source.files]
    content = repr([_FORMAT, source.version, kind, sorted(features), files]).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
