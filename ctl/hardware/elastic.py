"""Decides how many workers of a run can run at present."""

from collections.abc import Callable, Sequence
import dataclasses
import re
import time

from ctl.errors import UsageError
from ctl.hardware import cluster, gpu
from ctl.hardware.child_process import PIPE, ChildProcess

_CHECK_SECONDS = 5.0
_COMMAND_TIMEOUT = 30.0  # seconds
# The end of the launcher closes the pipe; the shell then kills the command, which may hang.
_STOP_WITH_PARENT = f'(read _ < "/dev/fd/${PIPE}"; kill -9 0) > /dev/null 2>&1 & exec sh -c "$1"'
_NUMBER = re.compile("[0-9]{1,9}")


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
            within that time after it was returned. With a command: seconds for which its answers must
            lead to the same number of workers before a run is stopped for it.
        is_usable: takes a slot, and returns whether its GPUs exist.
        command: determines the number of workers in place of the recorded losses.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        size: int,
        *,
        minimum: int | None = None,
        rejoin_seconds: float = 0.0,
        is_usable: Callable[[int], bool] = lambda slot: True,
        command: "AvailabilityCommand | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.size = size
        self.minimum = size if minimum is None else minimum
        self._rejoin_seconds = rejoin_seconds
        self._is_usable = is_usable
        self._command = command
        self._clock = clock
        self._losses: dict[int, _Loss] = {}
        self._accepted: set[int] = set()
        self._rejected: set[int] = set()
        self._next_check = 0.0
        self._last_check: list[int] | None = None
        self._unchanged_since = 0.0

    def slots(self) -> list[int]:
        """Returns the slots in which workers can run now; [] if there are fewer than the minimum.

        Raises:
            UsageError: the first run of the command failed or printed no number.
        """
        usable = [slot for slot in range(self.size) if self._is_usable(slot)]
        if self._command is None:
            now = self._clock()
            usable = [s for s in usable if s not in self._losses or now >= self._return_time(s)]
            limit = len(usable)
        else:
            limit = min(len(usable), self._command.read() or 0)
        numbers = [n for n in range(self.minimum, limit + 1) if n not in self._rejected]
        # If not all slots are needed, the most recently lost ones are not used.
        usable.sort(key=lambda s: (self._losses[s].time if s in self._losses else 0.0, s))
        return sorted(usable[: max(numbers, default=0)])

    def is_known(self) -> bool:
        """Returns whether the number of workers is known: False before the first answer of a command."""
        return self._command is None or self._command.read() is not None

    def must_change(self, running: Sequence[int]) -> bool:
        """Returns whether a run must stop, to continue on other slots.

        Each change stops and starts all processes, so two checks in a row must agree. With a command,
        all its answers for `rejoin_seconds` must agree, so that a command whose answers change all the
        time never stops the run. Checks at most every five seconds, and returns False in between.

        Args:
            running: the slots of the workers that run now.
        """
        answer_time = now = self._clock()
        seconds = 0.0
        if self._command is not None:
            self._command.read()
            # Not `now`: a command that fails after one answer does not confirm that answer.
            answer_time, seconds = self._command.answer_time, self._rejoin_seconds
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        slots = self.slots()
        if slots != self._last_check:
            self._last_check, self._unchanged_since = slots, answer_time
        unchanged = answer_time - self._unchanged_since
        return unchanged > 0 and unchanged >= seconds and slots != list(running)

    def lose(self, slot: int) -> None:
        """Records that the worker of a slot was lost."""
        now, wait = self._clock(), self._rejoin_seconds
        if slot in self._losses and now < self._return_time(slot) + self._losses[slot].wait:
            wait = 2 * self._losses[slot].wait
        self._losses[slot] = _Loss(now, wait)
        if self._command is not None:
            self._command.refresh()

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

    def close(self) -> None:
        """Ends the command if it runs."""
        if self._command is not None:
            self._command.close()

    def _return_time(self, slot: int) -> float:
        return self._losses[slot].time + self._losses[slot].wait


class AvailabilityCommand:
    """A user's shell command that prints how many workers can run.

    It has the role of the host discovery script of Elastic Horovod. It runs in the background from the
    first `read` on, and starts again five seconds after it has ended.

    Args:
        command: a shell command.
        print_line: prints a line.
        clock: a monotonic clock, in seconds.

    Attributes:
        answer_time: the time of `clock` at which the command last printed a number.
    """

    def __init__(
        self,
        command: str,
        *,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._command = command
        self._print_line = print_line
        self._clock = clock
        self._process: ChildProcess | None = None
        self._lines: list[str] = []
        self._number: int | None = None
        self.answer_time = 0.0
        self._has_failed = self._is_stale = False
        self._next_start = self._deadline = 0.0

    def read(self) -> int | None:
        """Returns the last number; None until the command has ended once, and again after `refresh`.

        Raises:
            UsageError: the first run of the command failed or printed no number.
        """
        now = self._clock()
        if self._process is None:
            if now >= self._next_start:
                self._lines = []
                self._deadline = now + _COMMAND_TIMEOUT
                command = ["sh", "-c", _STOP_WITH_PARENT, "sh", self._command]
                self._process = ChildProcess(command, {}, self._lines.append)
        elif self._process.poll() is not None or now > self._deadline:
            is_late = self._process.poll() is None
            code = self._process.poll()
            self.close()
            self._next_start = now + _CHECK_SECONDS
            self._is_stale = False
            self._evaluate("does not end" if is_late else f"ends with exit code {code}")
        return None if self._is_stale else self._number

    def refresh(self) -> None:
        """Discards the last number, which may be outdated, for example after a worker was lost."""
        self.close()
        self._is_stale, self._next_start = True, 0.0

    def close(self) -> None:
        """Ends the command if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.drain()
            self._process = None

    def _evaluate(self, ending: str) -> None:
        text = next((line.strip() for line in reversed(self._lines) if line.strip()), "")
        if ending == "ends with exit code 0" and _NUMBER.fullmatch(text):
            self._number, self._has_failed = int(text), False
            self.answer_time = self._clock()
            return
        problem = (
            f"The command of --available, {self._command!r}, must print the number of workers that can "
            f"run, but {ending} and prints {text[:100]!r}"
        )
        if self._number is None:
            raise UsageError(f"{problem}: fix it.")
        if not self._has_failed:
            self._print_line(f"{problem}; its last number, {self._number}, remains valid.")
        self._has_failed = True


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
