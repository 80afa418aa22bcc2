"""Child processes, which stop when the process that started them ends."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import os
import signal
import subprocess
import threading
from types import FrameType

from ctl.errors import write_text

# Environment variables that decide what a user's code imports.
KERAS = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
# An environment variable: the folder into which a process writes tracebacks.
TRACEBACK_FOLDER = "CTL_TRACEBACK_FOLDER"
# A variable with a file descriptor. The process removes it, so that its children do not inherit it.
PIPE = "CTL_PARENT_PIPE"
# In one call for a line and its end, since several threads print.
_print = functools.partial(print, end="", flush=True)


class ChildProcess:
    """Starts a process in a process group of its own, and prints its output line by line.

    Args:
        name: the name that each line begins with.
        command: the program and its arguments.
        environment: variables to set in addition to those of the current process.

    Attributes:
        environment: the variables that were set.
        line: the last line of its output that is not empty.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name, self.environment, self.line = name, environment, ""
        self._is_stopping = False
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **environment, PIPE: str(_open_pipe())},
            pass_fds=[_open_pipe()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # In the process group of this process, Ctrl-C would reach it a second time.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._print_output, daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, 128 + N after signal N as in shells; None while the process runs."""
        code = self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self) -> None:
        """Sends SIGTERM, but only once: a second one would end a process that saves."""
        if not self._is_stopping:
            self._is_stopping = True
            self._popen.terminate()

    def kill(self) -> None:
        """Kills the process and all processes that it started, and prints the rest of the output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        # A process of another group may keep the pipe open. Many short waits, since one of five seconds
        # ends without a line if this process itself is paused for so long.
        for _ in range(50):
            self._reader.join(timeout=0.1)

    def _print_output(self) -> None:
        for line in self._popen.stdout or ():
            write_text(f"[{self.name}] {line}", _print)
            self.line = line.strip() or self.line


@contextlib.contextmanager
def receive_signals() -> Iterator[list[int]]:
    """Collects the SIGINT, SIGTERM and SIGHUP that arrive in the `with` block, for `pass_on`."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        # The end of a terminal may send SIGHUP twice, and the second signal kills.
        if number != signal.SIGHUP or not received:
            received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(signals: Sequence[int], children: Iterable[ChildProcess]) -> None:
    """Stops the children after a first signal, so that they save; kills them after a second one."""
    for child in children if signals else ():
        child.stop() if len(signals) == 1 else child.kill()


def stop_with_parent() -> None:
    """Lets this process save and stop if the one that started it as a `ChildProcess` dies.

    A process that is killed by SIGKILL cannot stop its children itself, and a run that goes on alone
    uses the devices, the ports and the folder that a new start requires. Call it before anything else;
    it has no effect in a process that the user has started.
    """
    descriptor = os.environ.pop(PIPE, "")
    if descriptor:
        threading.Thread(target=_wait_for_end, args=(int(descriptor),), daemon=True).start()


@functools.cache
def _open_pipe() -> int:
    """Returns the read end of a pipe that this process never writes to.

    The kernel closes the other end when this process ends in any way. (A signal of the kernel,
    PR_SET_PDEATHSIG, arrives once per thread of the parent, and a second SIGTERM kills a run.)
    """
    return os.pipe()[0]


def _wait_for_end(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)  # loop/stop.py then saves and stops
