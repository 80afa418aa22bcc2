"""Training in windows: the processes of a benchmark take turns, so that other load affects all alike.

The parent starts one process per program, and requests one window of one process at a time. `serve` is
the side of the process. This module needs only Python and NumPy, for programs of other frameworks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

WARM_UPS = 2  # windows that are not counted: the first one includes tracing


class Done(Exception):
    """The parent requests no more windows."""


class Windows:
    """Divides endless training into windows; the training pauses between two of them.

    Attributes:
        sync: waits until the steps of the last call are done on the device.
    """

    def __init__(self, requests, answers):
        self.sync = lambda: None
        self._requests, self._answers = requests, answers
        self._wait_for_request()

    def __call__(self, steps: int) -> None:
        """Counts the steps since the last call.

        Raises:
            Done: The parent requests no more windows.
        """
        self._steps += steps
        if time.perf_counter() < self._end:
            return
        self.sync()
        answer = {
            "steps": self._steps,
            "seconds": time.perf_counter() - self._start,
            "peak_mib": memory_mib("VmHWM"),
        }
        print(json.dumps(answer), file=self._answers, flush=True)
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        request = self._requests.readline()
        if not request:
            raise Done
        self._steps, self._start = 0, time.perf_counter()
        self._end = self._start + float(request)


def memory_mib(name: str, pid: int | str = "self") -> float:
    """Returns a size of a process by its name in /proc: VmRSS now, or VmHWM, its peak."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024


def reset_peak() -> None:
    """Lets VmHWM begin anew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def answers_only():
    """Yields the standard output for answers, and sends what frameworks print to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers


def serve(train: Callable[[Windows], None]) -> None:
    """Trains in the windows that the parent requests, until it closes stdin.

    Args:
        train: trains endlessly; calls its argument with the number of steps since the last call.
    """
    with answers_only() as answers, contextlib.suppress(Done):
        train(Windows(sys.stdin, answers))


@contextlib.contextmanager
def worker(command: Sequence[str], **options) -> Iterator[subprocess.Popen]:
    """Starts a process that trains on request; `options` are those of `subprocess.Popen`."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def request(name: str, process: subprocess.Popen, line: object) -> dict[str, float]:
    """Sends a line to a worker process, such as the seconds of a window; returns its answer."""
    with contextlib.suppress(BrokenPipeError):  # reported below, by the missing answer
        print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"The process of '{name}' failed; its output is above.")
    return json.loads(answer)


def measure(
    start: Mapping[str, Callable[[], contextlib.AbstractContextManager[subprocess.Popen]]],
    *,
    title: str,
    processes: int,
    windows: int,
    seconds: float,
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Measures programs in alternating windows, in a different order each round.

    Args:
        start: name of a program -> a function that starts a process of it.
        title: the subject, for the progress on stderr.
        processes: how often all processes are started.
        windows: measured windows of each process.
        seconds: the least duration of a window.

    Returns:
        Program -> processes -> windows -> steps per second, and program -> peak MiB.
    """
    names = list(start)
    rates: dict[str, list[list[float]]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0.0)
    for process in range(processes):
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(start[name]()) for name in names}
            for name in names:
                rates[name].append([])
            for window in range(-WARM_UPS, windows):
                print_progress(f"{title}: process {process + 1}, window {window + 1} of {windows}")
                for name in random.Random(window).sample(names, len(names)):
                    answer = request(name, workers[name], seconds)
                    peaks[name] = max(peaks[name], answer["peak_mib"])
                    if window >= 0:
                        rates[name][-1].append(answer["steps"] / answer["seconds"])
    return rates, peaks


def print_progress(text: str) -> None:
    """Prints to stderr; stdout has only the tables."""
    print(text, file=sys.stderr, flush=True)
