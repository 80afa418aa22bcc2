"""Decides with how many workers a run continues, and whether to start it again."""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import time

from ctl.hardware import cluster, gpu

_CHECK_SECONDS = 5.0
# Failures in a row without a new checkpoint after which the run is not restarted. Two machines in a row
# may be lost by chance; a program that fails with an exit code twice is likely to fail again.
_MAX_LOSSES, _MAX_FAILURES = 3, 2


@dataclasses.dataclass(frozen=True)
class _Loss:
    time: float
    wait: float  # seconds until the worker is tried again


class WorkerPool:
    """The slots in which workers can run: each has a fixed share of the machine's GPUs.

        pool = WorkerPool(4, minimum=2, rejoin_seconds=300)
        pool.slots()    # [0, 1, 2, 3]
        pool.lose(1)
        pool.slots()    # [0, 2, 3] for 300 seconds

    By default, all slots can always be used.

    Args:
        size: the number of slots.
        minimum: the smallest number of workers that a run may have; `size` by default.
        rejoin_seconds: seconds for which a lost slot is not used; doubled if the slot is lost again
            within that time after it was returned.
        gpus: indices or UUIDs of the GPUs that the slots share. A slot is not used while the driver
            does not report all of its GPUs; if it reports none at all now, they are not checked.

    Attributes:
        gpus: the argument.
    """

    def __init__(
        self,
        size: int,
        *,
        minimum: int | None = None,
        rejoin_seconds: float = 0.0,
        gpus: Sequence[str] = (),
    ):
        self.size = size
        self.gpus = gpus
        self.minimum = size if minimum is None else minimum
        self._rejoin_seconds = rejoin_seconds
        self._gpus_of: list[list[str]] | None = None
        if any(gpu.is_reported(name) for name in gpus):
            tasks = cluster.make_local_clusters(workers=size, servers=0, ports=range(size))
            shares = gpu.divide_among_processes(tasks, gpus)
            self._gpus_of = [gpu.visible_gpus(share) or [] for share in shares]
        self._losses: dict[int, _Loss] = {}
        self._accepted: set[int] = set()
        self._rejected: set[int] = set()
        self._next_check = 0.0
        self._last_check: list[int] | None = None

    def slots(self) -> list[int]:
        """Returns the slots in which workers can run now; [] if there are fewer than the minimum."""
        now = time.monotonic()
        usable = [
            slot
            for slot in range(self.size)
            if self.is_usable(slot) and (slot not in self._losses or now >= self._return_time(slot))
        ]
        numbers = [n for n in range(self.minimum, len(usable) + 1) if n not in self._rejected]
        # If not all slots are needed, the most recently lost ones are not used.
        usable.sort(key=lambda s: (self._losses[s].time if s in self._losses else 0.0, s))
        return sorted(usable[: max(numbers, default=0)])

    def is_usable(self, slot: int) -> bool:
        """Returns whether the GPUs of a slot exist."""
        if self._gpus_of is None:
            return True
        # With fewer GPUs than slots, the share of the last slots is empty: they cannot be used.
        names = self._gpus_of[slot]
        return bool(names) and all(gpu.is_reported(name) for name in names)

    def must_change(self, running: Sequence[int]) -> bool:
        """Returns whether a run must stop, to continue on other slots.

        Each change stops and starts all processes, so two checks in a row must agree. Checks at most
        every five seconds, and returns False in between.

        Args:
            running: the slots of the workers that run now.
        """
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        slots = self.slots()
        agrees = slots == self._last_check
        self._last_check = slots
        return agrees and slots != list(running)

    def lose(self, slot: int) -> None:
        """Records that the worker of a slot was lost."""
        now, wait = time.monotonic(), self._rejoin_seconds
        if slot in self._losses and now < self._return_time(slot) + self._losses[slot].wait:
            wait = 2 * self._losses[slot].wait
        self._losses[slot] = _Loss(now, wait)

    def accept(self, number: int) -> None:
        """Records that the run has trained with this number of workers."""
        self._accepted.add(number)

    def reject(self, number: int) -> bool:
        """Records that the run ended with a user error with this number of workers.

        Returns:
            True if another number may help, because the run has trained with another one before, and
            never with this one. False otherwise: the error does not depend on the number.
        """
        if number in self._accepted or not self._accepted:
            return False
        self._rejected.add(number)
        return True

    def _return_time(self, slot: int) -> float:
        return self._losses[slot].time + self._losses[slot].wait


class FailureLimit:
    """Detects a run that fails again and again without a new checkpoint.

    The cause is then probably the program and not a machine. If it is a machine, a restart does not
    help either, because each start computes the same steps again.

    Args:
        workdir: the workdir of the run, which need not exist yet.
    """

    def __init__(self, workdir: pathlib.Path):
        self._folder = workdir / "checkpoints"
        self._events = workdir / "events.jsonl"
        self._markers = self._read_markers()
        self._count = 0
        self.record_start()

    def record_start(self) -> None:
        """Records that the processes are started now."""
        self._beginnings = self._count_beginnings()
        self._old_markers = self._read_markers()

    def has_begun(self) -> bool:
        """Returns whether the run has begun to train since `record_start`."""
        return self._count_beginnings() > self._beginnings

    def has_saved(self) -> bool:
        """Returns whether the run has written a checkpoint since `record_start`."""
        return bool(self._read_markers() - self._old_markers)

    def is_reached(self, *, is_loss: bool) -> bool:
        """Records a failure, and returns whether the run should not be restarted.

        Args:
            is_loss: whether the exit code indicates that a worker was lost.
        """
        markers = self._read_markers()
        self._count = self._count + 1 if markers == self._markers else 1
        self._markers = markers
        return self._count >= (_MAX_LOSSES if is_loss else _MAX_FAILURES)

    def _count_beginnings(self) -> int:
        """Counts the events that the run writes after all checks of the config."""
        if not self._events.exists():
            return 0
        with self._events.open(encoding="utf-8", errors="replace") as file:
            return sum(_read_event(line) in ("start", "resume") for line in file)

    def _read_markers(self) -> set[str]:
        return {path.name for path in self._folder.glob("ckpt-*.whole")}


def _read_event(line: str) -> str:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):  # such as a line that a full disk has cut off
        return ""
