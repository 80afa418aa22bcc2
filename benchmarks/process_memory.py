"""The memory of processes while they train, and how much it grows."""

import contextlib
import dataclasses
import statistics
import time

from benchmarks.windows import memory_mib

SETTLING = 10.0  # seconds after the first new checkpoint during which a process may still grow


@dataclasses.dataclass
class Memory:
    """The memory of one process.

    Attributes:
        name: the process, such as "worker 1".
        checkpoint: the step of the latest checkpoint when the process was first seen.
        samples: (time, MiB) since `SETTLING` seconds after the next checkpoint.
        settling: the monotonic time in seconds at which the samples begin; None before that checkpoint.
    """

    name: str
    checkpoint: int
    samples: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    settling: float | None = None

    def add(self, now: float, size: float, checkpoint: int) -> None:
        """Adds a sample, unless the process may still be tracing its first steps."""
        if self.settling is None and checkpoint > self.checkpoint:
            self.settling = now + SETTLING
        if self.settling is not None and now >= self.settling:
            self.samples.append((now, size))

    def median(self) -> float:
        """Returns the median of the samples in MiB."""
        return statistics.median(size for _, size in self.samples)

    def growth(self) -> float | None:
        """Returns the relative growth from the first to the last fifth of the samples.

        The medians of both are compared; 0.01 is a growth of 1 %. None with fewer than ten samples.
        """
        sizes = [size for _, size in self.samples]
        part = len(sizes) // 5
        return None if part < 2 else _growth(sizes, part)


def growth_between_starts(memories: list[Memory]) -> dict[str, float]:
    """Returns the relative growth of each task from its first to its last starts.

    The medians of the first and of the last third of the starts are compared. Tasks that were started
    only once are not in the result.
    """
    growth = {}
    for name in dict.fromkeys(memory.name for memory in memories):
        medians = [m.median() for m in memories if m.name == name and m.samples]
        if len(medians) > 1:
            growth[name] = _growth(medians, max(1, len(medians) // 3))
    return growth


def _growth(sizes: list[float], part: int) -> float:
    """The relative growth from the median of the first part of some sizes to that of the last one."""
    return statistics.median(sizes[-part:]) / statistics.median(sizes[:part]) - 1


def sample(pids: dict[str, int], memories: dict[int, Memory], checkpoint: int) -> None:
    """Adds one sample of each process.

    Args:
        pids: name -> pid of each process.
        memories: pid -> memory; new processes are added.
        checkpoint: the step of the latest checkpoint.
    """
    for name, pid in pids.items():
        with contextlib.suppress(OSError, TypeError):  # it has ended, or is ending
            size = memory_mib("RssAnon", pid)
            memories.setdefault(pid, Memory(name, checkpoint))
            memories[pid].add(time.monotonic(), size, checkpoint)
