"""Reads records of ArrayRecord files, which contain an index of their own.

The package array-record (the extra `arrayrecord`) is imported when the first file is opened.
"""

from collections.abc import Sequence
import os
import threading
from typing import Any

import numpy as np

from ctl.data.files.record_index import is_local
from ctl.data.files.record_reader import DamagedRecord
from ctl.errors import UsageError


def is_array_record(path: str) -> bool:
    """Returns whether a file is named like an ArrayRecord file, such as train.array_record-00000."""
    name = os.path.basename(path)
    return "array_record" in name or "arrayrecord" in name


class ArrayRecordReader:
    """The records of several ArrayRecord files, numbered in the order of the files.

    Every file is opened once at first, to count its records.

    Args:
        paths: the files.
        skip_damaged: must be False.

    Attributes:
        row_bytes: mean bytes of a record in the files, which may be compressed.
        supports_python: always true, since the package has no TensorFlow ops.

    Raises:
        UsageError: the package is missing, `skip_damaged` is set, a path is remote, or a file damaged.
    """

    supports_python = True
    skip_damaged = False

    def __init__(self, paths: Sequence[str], *, skip_damaged: bool):
        remote = [path for path in paths if not is_local(path)]
        if remote:
            raise UsageError(
                f"{remote[0]} is a remote ArrayRecord file, but only local ones can be read: copy it, "
                "or convert it by python -m ctl.data.convert."
            )
        if skip_damaged:
            raise UsageError(
                "data.skip_damaged=True requires TFRecord files: ArrayRecord files hold their index, "
                "which may be damaged, too."
            )
        self.paths = list(paths)
        # A reader is used by one thread at a time.
        self._local = threading.local()
        counts = [self._reader(path).num_records() for path in self.paths]
        for path, count in zip(self.paths, counts, strict=True):
            if not count:
                raise UsageError(f"{path} has no records: write the file again, or remove it.")
        self._first = np.cumsum([0, *counts])
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
            "convert them by python -m ctl.data.convert."
        )

    def _reader(self, path: str) -> Any:
        readers = self._local.__dict__.setdefault("readers", {})
        if path not in readers:
            readers[path] = _open(path)
        return readers[path]


def import_package() -> Any:
    """Returns the module of array-record that has its reader and writer.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise UsageError(
            "ArrayRecord files require the package array-record: pip install array-record."
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
