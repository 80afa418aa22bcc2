"""Reads records of TFRecord and ArrayRecord files by their number, and verifies their checksums.

Local files are read by Python: `os.pread` costs about a microsecond, and TensorFlow has no operation
that reads a part of a file. In a pipeline on a remote host, each record is a TFRecordDataset that
begins at its offset. That is about ten times slower for small records. `block_reader.py` reads the
files of object stores.

ArrayRecord files contain an index of their own. The package array-record (the extra `arrayrecord`) is
imported when the first one is opened.
"""

from collections.abc import Sequence
import functools
import logging
import os
import threading
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from ctl.data.data_errors import DamagedRecord
from ctl.data.files.record_index import HEAD, TAIL, FileIndex, is_local, masked_crc32c
from ctl.errors import Failure, UsageError, printable

_LOG = logging.getLogger("ctl")
_OPEN_FILES = 256
_REMOTE_READS = 16  # at the same time
_LONGEST_BUFFER = 2**18  # bytes that TensorFlow reads at a time


class RecordReader:
    """The records of several files, numbered in the order of the files; opens a file when it is read.

    Args:
        files: the index of each file.
        skip_damaged: replace a damaged record by the next one that is not damaged.

    Attributes:
        skipped: the numbers of the damaged records that were replaced so far.
        paths: the files.
        offsets: where in the files the records begin and end.
        row_bytes: mean length of a record in bytes.

    Raises:
        UsageError: a file is damaged, unless `skip_damaged` is set; or there are no records.
    """

    def __init__(self, files: list[FileIndex], *, skip_damaged: bool):
        for file in files:
            if file.damaged_at is None:
                continue
            what = f"{file.path} is truncated or damaged at offset {file.damaged_at}"
            if not skip_damaged:
                raise UsageError(
                    f"{what}: write the file again, or set skip_damaged=True to use the "
                    f"{len(file.offsets) - 1} records before it."
                )
            what = printable(what)
            _LOG.warning("%s: the records from there on cannot be read and are skipped.", what)
        self.paths = [file.path for file in files]
        self.skip_damaged = skip_damaged
        # Record i of file f is between the entries i + f and i + f + 1 of `_offsets`.
        self._offsets = self.offsets = np.concatenate([file.offsets for file in files])
        self._first = np.cumsum([0] + [len(file.offsets) - 1 for file in files])
        if len(self) == 0:
            raise UsageError(f"{self.paths[0]} has no records: write the file again, or remove it.")
        self.row_bytes = float(sum(f.offsets[-1] - f.offsets[0] for f in files)) / len(self)
        self.skipped: set[int] = set()
        self._open = functools.lru_cache(_OPEN_FILES)(self._open_file)

    def __len__(self) -> int:
        """The number of records."""
        return int(self._first[-1])

    def read_by_python(self, indexes: np.ndarray) -> np.ndarray:
        """Reads records: [rows] int64 -> [rows] bytes objects.

        Raises:
            DamagedRecord: the checksum of a record is wrong.
        """
        data = self._read_and_verify(indexes)
        if data is None:
            data = [self._read_valid(index) for index in indexes.tolist()]
        # An array of fixed-length strings would drop trailing zero bytes.
        return np.array(data, object)

    def _locate(self, indexes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the file of each record, where it begins there, and its length."""
        files = np.searchsorted(self._first, indexes, side="right") - 1
        starts = self._offsets[indexes + files]
        return files, starts, self._offsets[indexes + files + 1] - starts

    def _read_raw(self, indexes: np.ndarray) -> list[bytes]:
        """Returns the bytes of records, with their heads and tails."""
        files, starts, lengths = self._locate(indexes)
        # A file that the cache drops is closed when nothing refers to it: `opened` keeps it open, so
        # that its descriptor does not belong to another file by the time it is read.
        opened = {file: self._open(file) for file in set(files.tolist())}
        descriptors = [opened[file].fileno() for file in files.tolist()]
        places = zip(descriptors, lengths.tolist(), starts.tolist(), strict=True)
        read = os.pread
        return [read(descriptor, length, start) for descriptor, length, start in places]

    def read_in_graph(self, indexes: tf.Tensor) -> tf.Tensor:
        """Reads records by TensorFlow ops alone: [rows] int64 -> [rows] strings."""
        if self.skip_damaged:
            raise UsageError(
                "skip_damaged=True requires an input pipeline that does not run on a remote host: set "
                "skip_damaged=False."
            )
        files = tf.searchsorted(tf.constant(self._first), indexes, side="right", out_type=tf.int64)
        files -= 1
        offsets = tf.constant(self._offsets)
        starts = tf.gather(offsets, indexes + files)
        lengths = tf.gather(offsets, indexes + files + 1) - starts
        paths = tf.gather(tf.constant(self.paths), files)
        rows = tf.data.Dataset.from_tensors((paths, starts, lengths)).unbatch()
        parallel = {"cycle_length": _REMOTE_READS, "num_parallel_calls": _REMOTE_READS}
        records = rows.interleave(_read_record, **parallel, deterministic=True)
        return records.batch(tf.size(indexes, tf.int64)).get_single_element()

    def _open_file(self, file: int) -> Any:
        path = self.paths[file]
        try:
            return open(path, "rb", buffering=0)
        except OSError as error:  # it was indexed before
            raise Failure(f"{path} cannot be read: {error.strerror}.") from None

    def _read_and_verify(self, indexes: np.ndarray) -> list[bytes] | None:
        """Reads records; None if one is damaged. The loops in Python are kept short."""
        records, lengths = self._read_raw(indexes), self._locate(indexes)[2]
        if [len(record) for record in records] != lengths.tolist():
            return None  # the file has become shorter
        data = [record[HEAD:-TAIL] for record in records]
        stored_lengths = np.frombuffer(b"".join([record[:8] for record in records]), "<u8")
        stored = np.frombuffer(b"".join([record[-TAIL:] for record in records]), "<u4")
        checksum = google_crc32c.value
        checksums = np.array([checksum(value) for value in data], np.uint32)
        expected_lengths = (lengths - (HEAD + TAIL)).astype(np.uint64)
        are_equal = np.array_equal(stored_lengths, expected_lengths)
        return data if are_equal and np.array_equal(stored, masked_crc32c(checksums)) else None

    def _read_valid(self, index: int) -> bytes:
        """Reads a record, or the next one that is not damaged if damaged records are skipped.

        The replacement depends on the files and the index alone, so the global batch of a step
        remains a function of the seed and the step.
        """
        for candidate in range(index, index + len(self)):
            candidate %= len(self)
            data = self._read_and_verify(np.array([candidate]))
            if data is not None:
                return data[0]
            files, starts, _ = self._locate(np.array([candidate]))
            what = f"{self.paths[files[0]]} has a damaged record at offset {starts[0]}"
            if not self.skip_damaged:
                raise DamagedRecord(f"{what}.")
            if candidate not in self.skipped:
                self.skipped.add(candidate)
                text = "%s: it is skipped, and the next record takes its place (%d skipped so far)."
                _LOG.warning(text, printable(what), len(self.skipped))
        raise DamagedRecord(f"{self.paths[0]}: all records are damaged.")


def _read_record(path: tf.Tensor, start: tf.Tensor, length: tf.Tensor) -> tf.data.Dataset:
    """Reads the record at an offset; the public TFRecordDataset reads a file from the beginning."""
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=tf.reshape(path, [1]),
        compression_type=tf.constant(""),
        buffer_size=tf.minimum(length, _LONGEST_BUFFER),
        byte_offsets=tf.reshape(start, [1]),
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(1)


class ArrayRecordReader:
    """The records of several ArrayRecord files, numbered in the order of the files.

    Every file is opened once at first, to count its records.

    Args:
        paths: the files.
        skip_damaged: must be False.

    Attributes:
        offsets: [files + 1] int64, the number of the first record of each file.
        row_bytes: mean bytes of a record in the files, which may be compressed.

    Raises:
        UsageError: the package is missing, `skip_damaged` is set, a path is remote, or a file damaged.
    """

    skip_damaged = False

    def __init__(self, paths: Sequence[str], *, skip_damaged: bool):
        remote = [path for path in paths if not is_local(path)]
        if remote:
            raise UsageError(
                f"{remote[0]} is a remote ArrayRecord file, but only local ones can be read: copy it, "
                "or convert it by ctl convert."
            )
        if skip_damaged:
            raise UsageError(
                "skip_damaged=True requires TFRecord files: ArrayRecord files hold their index, "
                "which may be damaged, too."
            )
        self.paths = list(paths)
        # A reader is used by one thread at a time.
        self._local = threading.local()
        counts = [self._reader(path).num_records() for path in self.paths]
        for path, count in zip(self.paths, counts, strict=True):
            if not count:
                raise UsageError(f"{path} has no records: write the file again, or remove it.")
        self._first = self.offsets = np.cumsum([0, *counts])
        self.row_bytes = sum(os.path.getsize(path) for path in self.paths) / len(self)

    def __len__(self) -> int:
        """The number of records."""
        return int(self._first[-1])

    def read_by_python(self, indexes: np.ndarray) -> np.ndarray:
        """Reads records: [rows] int64 -> [rows] bytes objects.

        Raises:
            DamagedRecord: a file is damaged.
        """
        files = np.searchsorted(self._first, indexes, side="right") - 1
        records = np.empty(len(indexes), object)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            path = self.paths[file]
            try:
                # A list of bytes must be assigned one by one: numpy would make an array of strings.
                values = self._reader(path).read((indexes[rows] - self._first[file]).tolist())
            except (RuntimeError, IndexError) as error:
                raise DamagedRecord(f"{path} is damaged: {_first_line(error)}.") from None
            for row, value in zip(rows.tolist(), values, strict=True):
                records[row] = value
        return records

    def read_in_graph(self, indexes: Any) -> Any:
        """Raises UsageError: the package has no TensorFlow ops."""
        del indexes
        raise UsageError(
            "ArrayRecord files are read by a Python package, which does not run on a remote host: "
            "convert them by ctl convert."
        )

    def _reader(self, path: str) -> Any:
        readers = self._local.__dict__.setdefault("readers", {})
        if path not in readers:
            readers[path] = _open(path)
        return readers[path]


def is_array_record(path: str) -> bool:
    """Returns whether a file is named like an ArrayRecord file, such as train.array_record-00000."""
    name = os.path.basename(path)
    return "array_record" in name or "arrayrecord" in name


def import_package() -> Any:
    """Returns the module of array-record that has its reader and writer.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise UsageError(
            "ArrayRecord files, also those of data.cache in a folder, require the package "
            "array-record: pip install array-record."
        ) from None
    return array_record_module


def _open(path: str) -> Any:
    reader = import_package().ArrayRecordReader(path)
    if not reader.ok():
        try:
            reader.close()  # reports what is wrong
            problem = "it has no valid index"
        except RuntimeError as error:
            problem = _first_line(error)
        raise UsageError(f"{path} is damaged ({problem}): write the file again.")
    return reader


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
