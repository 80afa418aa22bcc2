"""Reads records of files in an object store in blocks of neighbors, ahead of their use.

A request takes about 50 ms however few bytes it returns, so a request per record limits the speed to a
few hundred records per second. `ctl.data.sampler.block_indexes` is a shuffled order in which the
records of some blocks are used at about the same time; the reader requests these blocks in parallel,
before the records are needed, and keeps them in memory.
"""

import collections
import concurrent.futures
import logging
import threading
import time

import numpy as np

from ctl.data.files.record_index import FileIndex
from ctl.data.files.record_reader import RecordReader
from ctl.hardware.file_systems import one_line, open_url

BLOCK_BYTES = 2**18
WINDOW_BLOCKS = 128  # whose records are shuffled together
_KEPT_BLOCKS = 3 * WINDOW_BLOCKS  # in memory: a window, the next one, and what is in between
_REQUESTS = 32  # at the same time
_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between the tries of a request

_Block = concurrent.futures.Future[bytes]


class BlockReader(RecordReader):
    """The records of several files in an object store, numbered in the order of the files.

    Args:
        files: the index of each file.
        skip_damaged: replace a damaged record by the next one that is not damaged.

    Attributes:
        rows: the number of records in a block.
    """

    def __init__(self, files: list[FileIndex], *, skip_damaged: bool):
        super().__init__(files, skip_damaged=skip_damaged)
        self.rows = max(1, round(BLOCK_BYTES / self.row_bytes))
        self._file_system, _ = open_url(self.paths[0])
        self._pool = concurrent.futures.ThreadPoolExecutor(_REQUESTS, "ctl-records")
        self._blocks: collections.OrderedDict[int, _Block] = collections.OrderedDict()
        self._lock = threading.Lock()
        # Where each record begins in the bytes of all of them, and where the last one ends.
        lengths = [np.diff(file.offsets) for file in files]
        self._places = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])

    @property
    def window(self) -> int:
        """The number of records that are shuffled together."""
        return WINDOW_BLOCKS * self.rows

    def read_ahead(self, indexes: np.ndarray) -> np.int64:
        """Starts to read the blocks of records, and does not wait for them."""
        with self._lock:
            for number in np.unique(indexes // self.rows).tolist():
                if number not in self._blocks:
                    end = min((number + 1) * self.rows, len(self))
                    self._blocks[number] = self._pool.submit(self._read, number * self.rows, end)
                self._blocks.move_to_end(number)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return np.int64(0)

    def _read_raw(self, indexes: np.ndarray) -> list[bytes]:
        """Returns the bytes of records, with their heads and tails."""
        numbers = indexes // self.rows
        parts: dict[int, tuple[int, _Block]] = {}
        for number in np.unique(numbers).tolist():
            with self._lock:
                block = self._blocks.get(number)
            start = number * self.rows
            if (
                block is None
            ):  # an order without blocks, as that of a mixture: no more than required
                wanted = indexes[numbers == number]
                start, end = int(wanted.min()), int(wanted.max()) + 1
                block = self._pool.submit(self._read, start, end)
            parts[number] = (start, block)
        result = []
        rows = zip(numbers, self._places[indexes], self._places[indexes + 1], strict=True)
        for number, begin, end in rows:
            first, block = parts[int(number)]
            origin = self._places[first]
            result.append(block.result()[begin - origin : end - origin])
        return result

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
                content: bytes = self._file_system.cat_file(path, start=start, end=end)
                return content
            except Exception as error:
                if delay is None or isinstance(error, FileNotFoundError):
                    raise OSError(f"{path} cannot be read ({one_line(error)})") from None
                logging.getLogger("ctl").warning("%s: %s; trying again", path, one_line(error))
                time.sleep(delay)
        raise AssertionError
