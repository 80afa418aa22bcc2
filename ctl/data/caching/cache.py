"""Caches parsed examples in memory or in a folder, so that they are read and parsed only once.

A cache in a folder is a subfolder, named by a fingerprint of the examples: the files and their sizes
and modification times, the specs of the features, and the operations of the parse function. Each
feature is a file of values in the order of the examples, which is mapped into memory. A cache is
written under another name and renamed when it is complete, so that the incomplete cache of a killed
process is never read. In memory, the same files have no names.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any, BinaryIO
import uuid

import numpy as np
import tensorflow as tf

from ctl.data import streams
from ctl.data.caching import fingerprint
from ctl.data.caching.cached_examples import Cached, Feature, RaggedCached
from ctl.data.data_errors import report_data_errors
from ctl.data.distribution import disable_autotune
from ctl.data.sequences import ragged
from ctl.data.source import Arrays, Augmented, Data, GlobalBatches, PerReplica, Source
from ctl.errors import UsageError

MEMORY = "memory"
_META = "features.json"
_ROWS = 256  # examples that are written at a time
_PROGRESS_SECONDS = 5.0
_PADDING = bytes(64)  # a file must not be empty to be mapped into memory

Open = Callable[[str], BinaryIO]


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
    if not place or isinstance(source, Arrays | ragged.Sequences | Cached | RaggedCached):
        return source  # is in memory
    if ragged.has_own_order(source):
        raise UsageError(
            f"data.cache does not support {type(source).__name__}: set data.cache='' and give it "
            "ctl.data.cached(source, place) of each of its sources."
        )
    examples = streams.all_examples(source)
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
    for name, feature in spec.items():
        if not isinstance(feature, tf.TensorSpec) or feature.shape.rank is None:
            raise UsageError(
                f"data.cache requires dense tensors of known rank, but {name!r} is {feature}: convert "
                "it in the parse function (tf.sparse.to_dense, tf.ensure_shape), or set data.cache=''."
            )
        if feature.dtype == tf.string and None in feature.shape.as_list():
            raise UsageError(
                f"data.cache does not support {name!r}, strings of different shapes: convert it in the "
                "parse function, or set data.cache=''."
            )


def _fill_memory(source: Source, examples: tf.data.Dataset) -> Source:
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}

        def open_file(name: str) -> BinaryIO:
            # A file without a name: in memory on Linux, on a disk elsewhere.
            has_memory = hasattr(os, "memfd_create")
            files[name] = stack.enter_context(
                os.fdopen(os.memfd_create(name), "wb") if has_memory else tempfile.TemporaryFile()  # noqa: SIM115
            )
            return files[name]

        features = _write(source, examples, open_file)
        # The mapping keeps the memory when the files are closed.
        return _load(features, lambda name: f"/dev/fd/{files[name].fileno()}")


def _load_or_fill(source: Source, examples: tf.data.Dataset, folder: str) -> Source:
    name = fingerprint.of_source(source, examples.element_spec)
    final = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        with _lock(f"{final}.lock"):
            if not os.path.exists(os.path.join(final, _META)):
                _remove_interrupted(folder, name)
                _fill_folder(source, examples, final)
    except OSError as error:
        raise UsageError(
            f"data.cache={folder} cannot be written ({error.strerror}): choose a folder on a local disk "
            "with more space, or data.cache=memory."
        ) from None
    with open(os.path.join(final, _META)) as file:
        features = [Feature(**feature) for feature in json.load(file)]
    return _load(features, lambda name: os.path.join(final, name))


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


@contextlib.contextmanager
def _lock(path: str) -> Iterator[None]:
    """Lets one process of this machine fill a cache while the others wait; its exit frees the lock."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_interrupted(folder: str, name: str) -> None:
    """Removes the files of processes that were killed while they filled this cache."""
    for other in os.listdir(folder):
        if other.startswith(f"{name}.") and other.endswith(".tmp"):
            shutil.rmtree(os.path.join(folder, other), ignore_errors=True)


def _write(source: Source, examples: tf.data.Dataset, open_file: Open) -> list[Feature]:
    """Writes all examples: a file of values for each feature, and a file of shapes if they differ."""
    spec, count = examples.element_spec, len(source)
    features = [
        Feature(name, i, count, s.dtype.name, s.shape.as_list())
        for i, (name, s) in enumerate(sorted(spec.items()))
    ]
    files = {f.values_file: open_file(f.values_file) for f in features}
    ragged_features = [f for f in features if f.is_ragged]
    files |= {f.shapes_file: open_file(f.shapes_file) for f in ragged_features}
    is_even = not ragged_features
    elements = examples.batch(_ROWS) if is_even else examples.prefetch(_ROWS)
    begin = shown = time.monotonic()
    done = 0
    for element in _read(elements):
        for feature in features:
            value = element[feature.name].numpy()
            if feature.is_ragged:
                files[feature.shapes_file].write(np.array(value.shape, "<i8").tobytes())
            files[feature.values_file].write(feature.encode(value))
        done += len(value) if is_even else 1
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            line = f"Filling the cache: {done:,} of {count:,} examples, {shown - begin:.0f} s"
            print(line, file=sys.stderr, flush=True)
    if done != count:
        raise UsageError(f"The data has {count} examples, but only {done} of them could be read.")
    for file in files.values():
        file.write(_PADDING)
        file.flush()
    return features


def _read(elements: tf.data.Dataset) -> Iterator[Any]:
    with report_data_errors("cached", lambda: elements.element_spec):
        yield from disable_autotune(elements)


def _load(features: list[Feature], path_of: Callable[[str], str]) -> Source:
    kind = RaggedCached if any(feature.is_ragged for feature in features) else Cached
    return kind(features, path_of)
