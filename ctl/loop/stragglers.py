"""Reports the processes of a run that the others wait for."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any, NamedTuple

from ctl.loop.actions.action import LoopAction

LIMIT = 1.5  # a process is slow if its own work takes more than this multiple of the median
LEAST_SECONDS = 1.0  # the minimum duration of a measurement


class WorkerTimes(NamedTuple):
    """The time of an inner loop in one process, by activity.

    Attributes:
        seconds: the duration of the loop; nearly the same in all processes.
        input: seconds in which its steps waited for their batches.
        waiting: seconds in which its reductions waited for the other processes and for the transfer.
            Reductions that run at the same time can add up to more than `seconds`.
    """

    seconds: float
    input: float
    waiting: float

    @property
    def own(self) -> float:
        """Seconds of its own work: computing and input."""
        return max(0.0, self.seconds - self.waiting)

    @property
    def computing(self) -> float:
        """Seconds that are neither waiting nor input."""
        return max(0.0, self.own - self.input)

    def add(self, other: "WorkerTimes") -> "WorkerTimes":
        """Returns the times of two loops together."""
        waiting = sum(min(each.waiting, each.seconds) for each in (self, other))
        return WorkerTimes(self.seconds + other.seconds, self.input + other.input, waiting)

    def numbers(self) -> dict[str, float]:
        """Returns the seconds to log and to record, which add up to at most `seconds`."""
        waiting = min(self.waiting, self.seconds)
        return {"computing": self.computing, "waiting": waiting, "input": self.input}


class Stragglers(LoopAction):
    """Prints and records one line when a process becomes slow, and one when it no longer is.

    A process is slow if, in two consecutive measurements, its own work takes more than 1.5 times the
    median of all processes, and exceeds the median by more than 10 % of the measurement's duration. A
    measurement adds up inner loops until they have taken a second, so that the noise of a short loop is
    not reported.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._sum: list[WorkerTimes] = []
        self._exceeded: set[int] = set()  # indices that exceeded the limit in the last measurement
        self._slow: set[int] = set()  # indices that are reported as slow

    @property
    def _members(self) -> Sequence[tuple[str, str]]:
        """The name and the host of each process."""
        return self.controller.processes.members

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Adds and logs the times of the last loop, if they are measured."""
        reporter = self.controller.reporter
        if reporter.process_seconds:
            times = [WorkerTimes(*seconds) for seconds in reporter.process_seconds]
            reporter.log_with_loop(self.numbers(times))
            self.add(self.controller.step, times)

    def add(self, step: int, times: Sequence[WorkerTimes]) -> None:
        """Adds an inner loop.

        Args:
            step: the step at which the loop ended.
            times: the times of each process, in the order of `members`.
        """
        if self._is_first:  # the first loop traces and compiles
            self._is_first = False
            return
        earlier = self._sum or [WorkerTimes(0.0, 0.0, 0.0)] * len(times)
        self._sum = [a.add(b) for a, b in zip(earlier, times, strict=True)]
        if max(each.seconds for each in self._sum) < LEAST_SECONDS:
            return
        measured, self._sum, reporter = self._sum, [], self.controller.reporter
        exceeding = find_slow(measured)
        for index in sorted(exceeding & self._exceeded - self._slow):
            self._slow.add(index)
            self._report(step, index, measured)
        for index in sorted(self._slow - exceeding - self._exceeded):
            self._slow.remove(index)
            name, host = self._members[index]
            reporter.record("straggler_ended", step, worker=name, host=host)
            reporter.print_line(f"{name} on {host} is as fast as the others again at step {step}.")
        self._exceeded = exceeding

    def numbers(self, times: Sequence[WorkerTimes]) -> dict[str, float]:
        """Returns the values to log for a loop.

        Args:
            times: the times of each process, in the order of `members`.

        Returns:
            Seconds by name, such as "workers/waiting_seconds/worker 1"; the kinds are computing, waiting
            and input.
        """
        return {
            f"workers/{kind}_seconds/{name}": seconds
            for (name, _), each in zip(self._members, times, strict=True)
            for kind, seconds in each.numbers().items()
        }

    def _report(self, step: int, index: int, times: Sequence[WorkerTimes]) -> None:
        (name, host), slow = self._members[index], times[index]
        median = _median(times)
        fields = {"worker": name, "host": host, **slow.numbers(), "median": median}
        self.controller.reporter.record("straggler", step, **fields)
        by_input = slow.input > slow.computing
        causes = "a slow disk or network" if by_input else "other programs and a slower processor"
        ratio = f"{slow.own / median:.1f} times" if median else "more than"
        self.controller.reporter.print_line(
            f"{name} on {host} is slow, and the other workers wait for it: its steps took "
            f"{slow.own:.1f} s ({slow.computing:.1f} s of computing, {slow.input:.1f} s of waiting for "
            f"input), {ratio} the median of {len(times)} workers ({median:.1f} s), until step {step}. "
            f"Check {host} for {causes}."
        )


def find_slow(times: Sequence[WorkerTimes]) -> set[int]:
    """Returns the indices of the processes that exceed the limits of `Stragglers`."""
    median = _median(times)
    least = max(LIMIT * median, median + 0.1 * max(each.seconds for each in times))
    return {index for index, each in enumerate(times) if each.own > least}


def _median(times: Sequence[WorkerTimes]) -> float:
    # With an even number, the lower middle value: the slow one of two processes must not raise it.
    return statistics.median_low(each.own for each in times)
