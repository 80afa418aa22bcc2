"""Examples from TFRecord files, read, parsed and shuffled in parallel and in a reproducible order."""

from collections.abc import Callable, Mapping
import operator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError, check_local
from ctl.private.tensorflow import tf_record

_MIN_RECORD = 16  # bytes: the length (8), its checksum (4), an empty record, its checksum (4)
_FIRST_TAIL = 2**16  # bytes read from the end of a file; more if its last record is longer


def tfrecords(
    pattern: str,
    features: Mapping[str, Any] | Callable[[tf.Tensor], dict[str, tf.Tensor]],
    *,
    split: str,
    seed: int = 0,
    interleave: int = 4,
    parallel_calls: int = tf.data.AUTOTUNE,
    cache: bool = False,
    shuffle_buffer: int = 10_000,
) -> tf.data.Dataset:
    """Returns a dataset of the examples in TFRecord files, shuffled through a buffer.

    Prefer `ctl.data.records`, which permutes all examples and resumes without reading earlier ones.
    This function reads files from their beginning to their end, which is better for slow remote
    storage.

        ctl.data.tfrecords("data/train-*.tfrecord", {
            "image": tf.io.FixedLenFeature([784], tf.float32),
            "label": tf.io.FixedLenFeature([], tf.int64)}, split=split, seed=self.options.seed)

    Args:
        pattern: path of a file, or a pattern of paths, which are read in sorted order; also gs://.
        features: the features for `tf.io.parse_single_example`, or a function from a serialized
            record to a dict of tensors, using TensorFlow ops.
        split: "train" shuffles files and examples by the seed, differently in each epoch; "eval"
            keeps their order.
        seed: the run's seed.
        interleave: how many files are read at a time; their records alternate. This argument, `cache`
            and `shuffle_buffer` change the order of the examples, and none makes it random.
        parallel_calls: how many records are parsed at a time; -1 lets tf.data choose.
        cache: keep the parsed examples in memory after the first epoch. Files are then read in the same
            order in each epoch, and only `shuffle_buffer` shuffles.
        shuffle_buffer: how many examples are shuffled at a time, in training only; 0 for none.

    Returns:
        A dataset of one epoch of unbatched examples. If it is repeated, the order depends on the
        files, the seed and `tf.random.set_seed` only. A second iteration of the same dataset object
        continues the shuffling of the first one instead of repeating it.

    Raises:
        UsageError: no file matches, a file is empty or truncated, or an argument is out of range.
    """
    if split not in ("train", "eval"):
        raise UsageError(f"ctl.data.tfrecords has no split {split!r}: choose train or eval.")
    _check_count("interleave", interleave, least=1)
    if parallel_calls != tf.data.AUTOTUNE:
        _check_count("parallel_calls", parallel_calls, least=1)
    _check_count("shuffle_buffer", shuffle_buffer, least=0)
    training = split == "train"
    paths = _paths(pattern)
    files = tf.data.Dataset.from_tensor_slices(paths)
    if training and not cache:  # a cache keeps the order of the first epoch
        files = files.shuffle(len(paths), seed=seed, reshuffle_each_iteration=True)
    # deterministic=True everywhere: the order must not depend on which file is read or which record
    # is parsed first.
    dataset = files.interleave(
        tf.data.TFRecordDataset,
        cycle_length=interleave,
        num_parallel_calls=min(interleave, len(paths)),
        deterministic=True,
    )
    dataset = dataset.map(_parser(features), num_parallel_calls=parallel_calls, deterministic=True)
    # The cache comes before the shuffle, so that each epoch has another order.
    if cache:
        dataset = dataset.cache()
    if training and shuffle_buffer:
        dataset = dataset.shuffle(shuffle_buffer, seed=seed, reshuffle_each_iteration=True)
    return dataset


def _check_count(name: str, value: Any, *, least: int) -> None:
    try:
        if not isinstance(value, bool) and operator.index(value) >= least:
            return
    except TypeError:  # not an integer
        pass
    raise UsageError(
        f"ctl.data.tfrecords: {name} is {value!r}, but must be an integer, at least {least}."
    )


def _parser(features: Any) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    if callable(features):
        return features
    return lambda record: tf.io.parse_single_example(record, dict(features))


def _paths(pattern: str) -> list[str]:
    if not pattern.startswith("gs://"):  # which TensorFlow reads itself
        check_local("ctl.data.tfrecords", pattern)
    paths = sorted(tf.io.gfile.glob(pattern))
    if not paths:
        raise UsageError(f"No TFRecord file matches {pattern!r}: set data.dir, or fix the pattern.")
    for path in paths:
        if tf.io.gfile.isdir(path):
            raise UsageError(
                f"{path} is a folder, but TFRecord files are required: add a pattern such as /*."
            )
        size = tf.io.gfile.stat(path).length
        if size == 0:
            raise UsageError(f"{path} is empty: write the file again, or remove it.")
        if not _ends_with_complete_record(path, size):
            raise UsageError(
                f"{path} is truncated or corrupt, it does not end with a complete record: write the "
                "file again."
            )
    return paths


def _ends_with_complete_record(path: str, size: int) -> bool:
    """Checks whether the last bytes of a file are a complete record.

    TensorFlow silently accepts a file that breaks off within the 12 bytes before a record. It detects
    all other damage when the record is read. To find the last record without reading the file, the
    tail is searched for a length that reaches exactly to the end of the file; TensorFlow's reader
    then verifies the checksums there.
    """
    # Not part of tf.io, but the only reader that verifies the checksums at a given offset.
    reader = tf_record.tf_record_random_reader(path)
    tail_size = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while tail_size < size:
            tail_size = min(size, max(_FIRST_TAIL, 8 * tail_size))
            file.seek(size - tail_size)
            tail = file.read(tail_size)
            starts = len(tail) - _MIN_RECORD + 1  # offsets at which a record may begin
            if len(tail) < tail_size or starts < 1:
                return False
            # The eight bytes at each offset, read as a length: a view, without copying.
            lengths: np.ndarray = np.ndarray([starts], "<u8", tail, strides=[1])
            lengths_to_end = np.arange(starts - 1, -1, -1, dtype=np.uint64)
            candidates = np.flatnonzero(lengths == lengths_to_end)[::-1]
            if any(_is_record(reader, size - tail_size + int(start)) for start in candidates):
                return True
    return False


def _is_record(reader: Any, offset: int) -> bool:
    """Returns whether a record with correct checksums begins at an offset of a file."""
    try:
        reader.read(offset)
    except (tf.errors.DataLossError, IndexError):
        return False
    return True
