"""Decides how many workers of a run can run at present."""

from collections.abc import Callable, Sequence
import dataclasses
import time

from ctl.hardware import cluster, gpu

_CHECK_SECONDS = 5.0


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
        is_usable: takes a slot, and returns whether its GPUs exist.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        size: int,
        *,
        minimum: int | None = None,
        rejoin_seconds: float = 0.0,
        is_usable: Callable[[int], bool] = lambda slot: True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.size = size
        self.minimum = size if minimum is None else minimum
        self._rejoin_seconds = rejoin_seconds
        self._is_usable = is_usable
        self._clock = clock
        self._losses: dict[int, _Loss] = {}
        self._accepted: set[int] = set()
        self._rejected: set[int] = set()
        self._next_check = 0.0
        self._last_check: list[int] | None = None

    def slots(self) -> list[int]:
        """Returns the slots in which workers can run now; [] if there are fewer than the minimum."""
        now = self._clock()
        usable = [
            slot
            for slot in range(self.size)
            if self._is_usable(slot)
            and (slot not in self._losses or now >= self._return_time(slot))
        ]
        numbers = [n for n in range(self.minimum, len(usable) + 1) if n not in self._rejected]
        # If not all slots are needed, the most recently lost ones are not used.
        usable.sort(key=lambda s: (self._losses[s].time if s in self._losses else 0.0, s))
        return sorted(usable[: max(numbers, default=0)])

    def must_change(self, running: Sequence[int]) -> bool:
        """Returns whether a run must stop, to continue on other slots.

        Each change stops and starts all processes, so two checks in a row must agree. Checks at most
        every five seconds, and returns False in between.

        Args:
            running: the slots of the workers that run now.
        """
        now = self._clock()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        slots = self.slots()
        agrees = slots == self._last_check
        self._last_check = slots
        return agrees and slots != list(running)

    def lose(self, slot: int) -> None:
        """Records that the worker of a slot was lost."""
        now, wait = self._clock(), self._rejoin_seconds
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


def make_gpu_check(workers: int, gpus: Sequence[str]) -> Callable[[int], bool]:
    """Returns a function that checks whether the driver still reports all GPUs of a slot.

    Args:
        workers: the number of slots.
        gpus: indices or UUIDs of the GPUs. If the driver reports none of them now, they are not
            checked.
    """
    tasks = cluster.make_local_clusters(workers=workers, servers=0, ports=range(workers))
    if not any(gpu.is_reported(name) for name in gpus):
        return lambda slot: True
    # With fewer GPUs than slots, the share of the last slots is empty: they cannot be used.
    shares = [gpu.visible_gpus(share) for share in gpu.divide_among_processes(tasks, gpus)]

    def is_usable(slot: int) -> bool:
        names = shares[slot]
        return bool(names) and all(gpu.is_reported(name) for name in names or ())

    return is_usable
