"""Says so when no step ends for a long time, and where every thread is. Loads no TensorFlow."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import faulthandler
import pathlib
import sys
import threading
import time
from types import FrameType

from ctl import errors
from ctl.loop import progress

FIRST = 10.0  # the first loop, which traces and compiles, may take so many times as long
_LONGEST_READ = 5.0  # seconds; a device may be too busy to tell the step
_DATA = str(pathlib.Path(__file__).parent.parent / "data")
_COMPILED = str(pathlib.Path(__file__).parent.parent / "replica" / "inner_loop.py")
_READING = ("from_generator_op.py", "iterator_ops.py", "distribute/input_lib.py", _DATA)


@dataclasses.dataclass
class _Loop:
    """A loop that is running: where it was seen last, and since when it has stood there."""

    step: int
    since: float
    limit: float
    told: bool = False


class Watchdog:
    """Watches a run's loops, from a thread of its own that ends with the `with` block.

        with StallWatch(300.0, step_of=..., data_kind=...) as watch:
            with watch.loop(step):
                train_a_little()

    Evaluation and saving, which are outside of a loop, are not watched. The step is read only when a
    loop has taken longer than the limit.
    """

    def __init__(
        self,
        seconds: float,
        *,
        step_of: Callable[[], int],
        data_kind: Callable[[], str],
        on_event: Callable[..., None] | None = None,
        write: Callable[[str], None] = errors.print_line,
        stacks: int = 2,
    ):
        """Watches nothing yet.

        Args:
            seconds: how long a step may take before a person is told; 0: for ever.
            step_of: reads the global step; called from another thread.
            data_kind: the class of what `build_dataset("train")` returned.
            on_event: called as on_event("stall", step, seconds=..., waits_for=...).
            write: where lines go.
            stacks: the file descriptor that the threads' stacks go to; standard error.
        """
        self._seconds = seconds
        self._step_of = step_of
        self._data_kind = data_kind
        self._on_event = on_event or (lambda *_, **__: None)
        self._write = write
        self._stacks = stacks
        self._loop: _Loop | None = None
        self._lock = threading.Lock()
        self._limit = FIRST * seconds
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            threading.Thread(target=self._run, name="ctl-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def loop(self, step: int) -> Iterator[None]:
        """Watches the block, a loop of steps.

        Args:
            step: the global step that it begins at.
        """
        loop = _Loop(step, time.monotonic(), self._limit)
        with self._lock:
            self._loop = loop
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
        self._limit = self._seconds
        if loop.told:
            self._tell_going_on(loop)

    def _run(self) -> None:
        while not self._ended.wait(max(0.02, min(self._seconds / 10, 10.0))):
            self._look()

    def _look(self) -> None:
        loop = self._loop
        if loop is None or not (loop.told or time.monotonic() - loop.since >= loop.limit):
            return
        step = self._read_step()
        with self._lock:  # a line of a loop that has ended would come after that of its end
            if self._loop is not loop:
                return
            if step is not None and step != loop.step:
                self._move(loop, step)
            elif not loop.told:
                loop.told = True
                self._tell(loop)

    def _move(self, loop: _Loop, step: int) -> None:
        if loop.told:
            self._tell_going_on(loop)
        loop.step, loop.since, loop.told = step, time.monotonic(), False

    def _read_step(self) -> int | None:
        """The step; None while the device does not tell."""
        if self._reader and self._reader.is_alive():
            return None
        found: list[int] = []

        def read() -> None:
            with contextlib.suppress(Exception):  # the main thread will meet it, too
                found.append(self._step_of())

        self._reader = threading.Thread(target=read, name="ctl-watchdog-step", daemon=True)
        self._reader.start()
        self._reader.join(_LONGEST_READ)
        return found[0] if found else None

    def _tell(self, loop: _Loop) -> None:
        seconds = time.monotonic() - loop.since
        what = self._waits_for()
        self._write(
            f"No step has ended for {progress.duration(seconds)}: after step {loop.step} the run "
            f"waits for {what}. It goes on waiting; the stacks of all threads:"
        )
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        with contextlib.suppress(Exception):  # a full disk is the main thread's to tell
            self._on_event("stall", loop.step, seconds=seconds, waits_for=what)

    def _tell_going_on(self, loop: _Loop) -> None:
        seconds = time.monotonic() - loop.since
        self._write(f"Going on, after {progress.duration(seconds)} at step {loop.step}.")

    def _waits_for(self) -> str:
        data = f'build_dataset("train") ({self._data_kind()})'
        files = [_files(frame) for frame in sys._current_frames().values()]
        if any(any(part in file for part in _READING) for stack in files for file in stack):
            return f"the trainer's {data}"
        if any(_COMPILED in stack for stack in files):  # it reads its data from Python
            return "the step itself"
        return f"the step itself, or the trainer's {data}"


def _files(frame: FrameType | None) -> list[str]:
    """The files that a thread's stack goes through."""
    files = []
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
