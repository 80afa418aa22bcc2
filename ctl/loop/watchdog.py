"""Reports a run in which no step ends, with the stacks of all threads.

`faulthandler.dump_traceback_later` alone is not enough: it cannot distinguish a loop that hangs from a
long one whose steps end, and records nothing in events.jsonl.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import faulthandler
import threading
import time
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.loop.actions.action import LoopAction
from ctl.loop.progress import format_duration

if TYPE_CHECKING:
    from ctl.loop.workdir import Workdir

STALL_SECONDS = 300.0  # seconds that a step may take before it is reported
FIRST = 10.0  # the first loop traces and compiles, so it may take this many times as long
_READ_SECONDS = 5.0  # how long to wait for the global step
_STACKS = 2  # the file descriptor for the threads' stacks: standard error


@dataclasses.dataclass
class _Loop:
    """A running loop: the last step seen, when that was, and whether it was reported since."""

    step: int
    since: float
    limit: float
    reported: bool = False


class Watchdog(LoopAction):
    """Watches the inner loops of a run from a thread, which ends with the training.

    Every process has one, since the input pipeline that hangs need not be the chief's. Evaluating and
    saving happen outside of a loop and are not watched. The step is read only when a loop has taken
    longer than the limit, so watching costs nothing in a run that does not hang.

    Args:
        seconds: how long a step may take before it is reported.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._limit = FIRST * seconds  # of the next loop
        self._loop: _Loop | None = None
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "Watchdog":
        """Makes the action of a config; see registry.py."""
        return cls(STALL_SECONDS)

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Runs the thread during the `with` block."""
        ended = threading.Event()
        threading.Thread(target=self._run, args=(ended,), name="ctl-watchdog", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    @contextlib.contextmanager
    def around(self, first: int, end: int) -> Iterator[None]:
        """Watches the `with` block, which runs the steps from `first` on."""
        loop = _Loop(first, time.monotonic(), self._limit)
        with self._lock:
            self._loop = loop
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
        self._limit = self._seconds
        if loop.reported:
            self._report_end(loop)

    def check_loop(self) -> None:
        """Reports the running loop if no step has ended in it for too long."""
        loop = self._loop
        if loop is None or not (loop.reported or time.monotonic() - loop.since >= loop.limit):
            return
        step = self._try_to_read_step()
        # Without the lock, the line about a stalled loop could follow the line about its end.
        with self._lock:
            if self._loop is not loop:
                return
            if step is not None and step != loop.step:
                if loop.reported:
                    self._report_end(loop)
                loop.step, loop.since, loop.reported = step, time.monotonic(), False
            elif not loop.reported:
                loop.reported = True
                self._report(loop)

    def _run(self, ended: threading.Event) -> None:
        # Often enough that a report is at most a tenth late, but rarely enough to cost nothing.
        while not ended.wait(max(0.02, min(self._seconds / 10, 10.0))):
            self.check_loop()

    def _try_to_read_step(self) -> int | None:
        """Returns the step; None if it cannot be read now, such as from a busy device."""
        # Reading a variable waits for the step that writes it. A separate thread keeps the watchdog
        # from hanging, too; a second one would only wait for the first.
        if self._reader and self._reader.is_alive():
            return None
        steps: list[int] = []

        def read() -> None:
            with contextlib.suppress(Exception):  # the main thread will raise it, too
                steps.append(self.controller.step)

        self._reader = threading.Thread(target=read, name="ctl-watchdog-step", daemon=True)
        self._reader.start()
        self._reader.join(_READ_SECONDS)
        return steps[0] if steps else None

    def _report(self, loop: _Loop) -> None:
        seconds = time.monotonic() - loop.since
        errors.print_line(
            f"No step has ended for {format_duration(seconds)}, after step {loop.step}. The run keeps "
            "waiting; the stacks of all threads show for what:"
        )
        # Writes to the descriptor directly: a thread that hangs may hold the lock of sys.stderr.
        faulthandler.dump_traceback(_STACKS, all_threads=True)
        with contextlib.suppress(Exception):  # a full disk is for the main thread to report
            self.controller.reporter.record("stall", loop.step, seconds=seconds)

    def _report_end(self, loop: _Loop) -> None:
        duration = format_duration(time.monotonic() - loop.since)
        errors.print_line(f"Going on, after {duration} at step {loop.step}.")
