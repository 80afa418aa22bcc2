"""Examples from TFRecord files, read, parsed and shuffled in parallel and in a fixed order."""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from ctl import errors
from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class TFRecordTuning:
    """How TFRecord files are read; `config.data.tfrecord` has the same keys.

    None of these makes the order random. `parallel_calls` does not change it, the others do.

    Attributes:
        interleave: how many files are read at once; their records alternate.
        parallel_calls: how many records are parsed at once; -1 lets tf.data choose.
        cache: keep the parsed examples in memory after the first pass. Files are then read in the
            same order each epoch, and only `shuffle_buffer` shuffles.
        shuffle_buffer: how many examples are mixed at a time, in training only; 0 for none.
    """

    interleave: int = 4
    parallel_calls: int = -1
    cache: bool = False
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, want = getattr(self, field.name), type(field.default)
            if type(value) is not want:
                raise UsageError(
                    f"data.tfrecord.{field.name} is {value!r}, a {type(value).__name__}: want a "
                    f"{want.__name__}."
                )
        if self.interleave < 1:
            raise UsageError(f"data.tfrecord.interleave is {self.interleave}, want 1 or more.")
        if self.parallel_calls != -1 and self.parallel_calls < 1:
            raise UsageError(
                f"data.tfrecord.parallel_calls is {self.parallel_calls}, want 1 or more, or -1."
            )
        if self.shuffle_buffer < 0:
            raise UsageError(
                f"data.tfrecord.shuffle_buffer is {self.shuffle_buffer}, want 0 or more."
            )

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "TFRecordTuning":
        """The tuning that a section of a config describes; what it lacks has its default."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in keys:
            if key not in known:
                there = errors.did_you_mean(key, known)
                raise UsageError(f"There is no key data.tfrecord.{key}{there}")
        return cls(**keys)


def tfrecords(
    pattern: str,
    features: Mapping[str, Any] | Callable[[tf.Tensor], dict[str, tf.Tensor]],
    *,
    split: str,
    seed: int = 0,
    tuning: Mapping[str, Any] | None = None,
) -> tf.data.Dataset:
    """Examples from TFRecord files.

        ctl.data.tfrecords("data/train-*.tfrecord", {
            "image": tf.io.FixedLenFeature([784], tf.float32),
            "label": tf.io.FixedLenFeature([], tf.int64)}, split=split, seed=self.options.seed,
            tuning=self.options.data.tfrecord)

    Args:
        pattern: a file, or a pattern of files, read in sorted order; wherever TensorFlow can read.
        features: what `tf.io.parse_single_example` takes, or a function from a serialized record to
            a dict of tensors, in TensorFlow ops.
        split: "train" shuffles files and examples by the seed, anew each epoch; "eval" does not.
        seed: the run's seed.
        tuning: the keys of `TFRecordTuning`.

    Returns:
        A dataset of one epoch of unbatched examples. Repeated, it gives an order that depends on
        the files, the seed and `tf.random.set_seed` alone; but iterating the same dataset object a
        second time goes on shuffling where the first time left off.

    Raises:
        UsageError: no file matches, or one is empty or truncated, or a key of `tuning` is wrong.
    """
    if split not in ("train", "eval"):
        raise UsageError(f"ctl.data.tfrecords has no split {split!r}: choose train or eval.")
    how = TFRecordTuning.of(tuning or {})
    training = split == "train"
    files = _files(pattern)
    names = tf.data.Dataset.from_tensor_slices(files)
    if training and not how.cache:  # a cache would keep the first epoch's order
        names = names.shuffle(len(files), seed=seed, reshuffle_each_iteration=True)
    dataset = names.interleave(
        tf.data.TFRecordDataset,
        cycle_length=how.interleave,
        num_parallel_calls=min(how.interleave, len(files)),
        deterministic=True,
    )
    dataset = dataset.map(
        _parser(features), num_parallel_calls=how.parallel_calls, deterministic=True
    )
    if how.cache:
        dataset = dataset.cache()
    if training and how.shuffle_buffer:
        dataset = dataset.shuffle(how.shuffle_buffer, seed=seed, reshuffle_each_iteration=True)
    return dataset


def _parser(features: Any) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    if callable(features):
        return features
    return lambda record: tf.io.parse_single_example(record, dict(features))


def corruption(error: tf.errors.DataLossError) -> str:
    """What TensorFlow found corrupt, out of a message that is mostly its own stack."""
    found = re.search(r"(corrupted|truncated) record at \d+", error.message)
    return found[0] if found else error.message.strip().splitlines()[-1]


def _files(pattern: str) -> list[str]:
    files = sorted(tf.io.gfile.glob(pattern))
    if not files:
        raise UsageError(
            f"No TFRecord file matches {pattern!r}: set data.dir, or mend the pattern."
        )
    for file in files:
        if tf.io.gfile.isdir(file):
            raise UsageError(f"{file} is a folder, want TFRecord files: add a pattern such as /*.")
        size = tf.io.gfile.stat(file).length
        if size == 0:
            raise UsageError(f"{file} is empty: write it again, or move it away.")
        if not _ends_with_a_record(file, size):
            raise UsageError(
                f"{file} is truncated or corrupt, it does not end with a whole record: write it again."
            )
    return files


def _ends_with_a_record(file: str, size: int) -> bool:
    """Whether a file's last bytes are the end of a record.

    TensorFlow takes a file that breaks off in the 12 bytes before a record for a whole one. A record
    is its length, the length's checksum, its bytes and theirs; the last one is looked for from the
    end, so that no more than it is read.
    """
    window = 0
    with tf.io.gfile.GFile(file, "rb") as opened:
        while window < size:
            window = min(size, max(2**16, 8 * window))
            opened.seek(size - window)
            tail = opened.read(window)
            count = window - 15
            if len(tail) < window or count < 1:
                return False
            lengths: np.ndarray = np.ndarray(
                [count], "<u8", tail, strides=[1]
            )  # were a record to begin there
            to_end = np.arange(count - 1, -1, -1, dtype=np.uint64)
            for start in np.flatnonzero(lengths == to_end)[::-1]:
                if _masked_crc(tail[start : start + 8]) == tail[start + 8 : start + 12]:
                    return True
    return False


def _masked_crc(content: bytes) -> bytes:
    """The checksum of TFRecord files: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
