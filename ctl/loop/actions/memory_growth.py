"""Reports a process whose memory keeps growing."""

from collections.abc import Callable, Mapping
import itertools
import os
import pathlib
from typing import Any

from ctl.loop.actions.action import Action

_STATM = pathlib.Path("/proc/self/statm")  # Linux
_FIRST_LOOPS = 10  # buffers, caches and allocators fill during these
_PARTS = 4
_MIB = 2**20


class MemoryGrowth(Action):
    """Prints and records one line if the resident memory keeps growing.

    Graphs of `tf.function`s are never freed (tensorflow#124972, #62854), and lists in a trainer or an
    action grow as well. A single increase is no leak: growth is reported if it is at least a quarter of
    the memory and 256 MiB, and if each quarter of the loops since the tenth has contributed to it. It
    is reported again when it has doubled. Reading the memory costs microseconds per loop.

    Args:
        least: the smallest growth to report, in bytes.
        share: the smallest growth to report, as a share of the memory after the first loops.
        read_memory: returns the resident bytes of this process; 0 if they are not known.
    """

    at = "train"
    may_stop = False

    def __init__(
        self,
        *,
        least: int = 256 * _MIB,
        share: float = 0.25,
        read_memory: Callable[[], int] | None = None,
    ):
        self._least = least
        self._share = share
        self._read_memory = read_memory or read_resident_bytes
        self._loops = 0
        self._first_step = 0
        self._samples: list[int] = []
        self._reported = 0

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Adds a measurement."""
        self._loops += 1
        if self._loops < _FIRST_LOOPS:
            return
        if self._loops == _FIRST_LOOPS:
            self._first_step = self.controller.step
        self._samples.append(self._read_memory())
        # Every second sample is dropped when there are many, so that a long run does not collect them.
        if len(self._samples) > 64 * _PARTS:
            self._samples = self._samples[::2]
        growth = self._samples[-1] - self._samples[0]
        limit = max(self._least, self._share * self._samples[0], 2 * self._reported)
        if growth >= limit and _grows_throughout(self._samples, by=growth / (2 * _PARTS)):
            self._reported = growth
            self._report(self._samples[0], self._samples[-1])

    def _report(self, before: int, after: int) -> None:
        reporter, step = self.controller.reporter, self.controller.step
        reporter.record("memory_growth", step, before=before, after=after)
        rate = (after - before) / _MIB / max(step - self._first_step, 1) * 1000
        reporter.print_line(
            f"The memory of this process grows: {before / _MIB:,.0f} MiB at step {self._first_step}, "
            f"{after / _MIB:,.0f} MiB now, {rate:,.0f} MiB per 1,000 steps. Check for functions that "
            "are traced again, and for lists of tensors in the trainer or its actions."
        )


def _grows_throughout(samples: list[int], *, by: float) -> bool:
    """Returns whether the minimum of each part of the samples exceeds the previous one by `by`."""
    size = len(samples) // _PARTS
    if size < 2:
        return False
    parts = [samples[i * size : (i + 1) * size] for i in range(_PARTS - 1)]
    least = [min(part) for part in (*parts, samples[(_PARTS - 1) * size :])]
    return all(after - before >= by for before, after in itertools.pairwise(least))


def read_resident_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
