"""Reads records of files in an object store in blocks of neighbors, ahead of their use.

A request takes about 50 ms however few bytes it returns, so a request per record limits the speed to a
few hundred records per second. `ctl.data.sampler.block_indexes` is a shuffled order in which the
records of some blocks are used at about the same time; the reader requests these blocks in parallel,
before the records are needed, and keeps them in memory.
"""

import concurrent.futures
import functools
import logging
import time

import numpy as np

from ctl.data.files.record_index import FileIndex
from ctl.data.files.record_reader import RecordReader
from ctl.errors import Failure
from ctl.hardware.file_systems import one_line, open_url

BLOCK_BYTES = 2**18
WINDOW_BLOCKS = 128  # whose records are shuffled together
_KEPT_BLOCKS = 3 * WINDOW_BLOCKS  # in memory: a window, the next one, and what is in between
_REQUESTS = 32  # at the same time
_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between the tries of a request


class BlockReader(RecordReader):
    """The records of several files in an object store, numbered in the order of the files.

    Args:
        files: the index of each file.
        skip_damaged: replace a damaged record by the next one that is not damaged.

    Attributes:
        rows: the number of records in a block.
        window: the number of records that are shuffled together.
    """

    def __init__(self, files: list[FileIndex], *, skip_damaged: bool):
        super().__init__(files, skip_damaged=skip_damaged)
        self.rows = max(1, round(BLOCK_BYTES / self.row_bytes))
        self.window = WINDOW_BLOCKS * self.rows
        self._file_system, _ = open_url(self.paths[0])
        self._pool = concurrent.futures.ThreadPoolExecutor(_REQUESTS, "ctl-records")
        self._block = functools.lru_cache(_KEPT_BLOCKS)(self._start_block)
        # Where each record begins in the bytes of all of them, and where the last one ends.
        lengths = [np.diff(file.offsets) for file in files]
        self._places = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])

    def read_ahead(self, indexes: np.ndarray) -> np.int64:
        """Starts to read the blocks of records, and does not wait for them."""
        for number in np.unique(indexes // self.rows).tolist():
            self._block(number)
        return np.int64(0)

    def _read_raw(self, indexes: np.ndarray) -> list[bytes]:
        """Returns the bytes of records, with their heads and tails."""
        numbers = indexes // self.rows
        blocks = {number: self._block(number) for number in np.unique(numbers).tolist()}
        first = self._places[numbers * self.rows]
        begins, ends = self._places[indexes] - first, self._places[indexes + 1] - first
        rows = zip(numbers.tolist(), begins, ends, strict=True)
        return [blocks[number].result()[begin:end] for number, begin, end in rows]

    def _start_block(self, number: int) -> "concurrent.futures.Future[bytes]":
        end = min((number + 1) * self.rows, len(self))
        return self._pool.submit(self._read, number * self.rows, end)

    def _read(self, start: int, end: int) -> bytes:
        """Requests the records from `start` to `end`, one request for each of their files."""
        parts = []
        while start < end:
            file = int(np.searchsorted(self._first, start, side="right")) - 1
            last = min(end, int(self._first[file + 1]))
            first_byte, end_byte = self._offsets[start + file], self._offsets[last + file]
            parts.append(self._request(self.paths[file], int(first_byte), int(end_byte)))
            start = last
        return b"".join(parts)

    def _request(self, path: str, start: int, end: int) -> bytes:
        for delay in (*_DELAYS, None):
            try:
                return self._file_system.cat_file(path, start=start, end=end)
            except Exception as error:
                if delay is None or isinstance(error, FileNotFoundError):
                    raise Failure(f"{path} cannot be read: {one_line(error)}.") from None
                logging.getLogger("ctl").warning("%s: %s; trying again", path, one_line(error))
                time.sleep(delay)
                self._file_system, _ = open_url(path)  # reads the credentials again
        raise AssertionError
