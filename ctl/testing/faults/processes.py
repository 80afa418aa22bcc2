"""The processes that `ctl.launch` started: lost, or standing still for a while. Linux alone."""

import json
import os
import pathlib
import signal
import time

from ctl.errors import UsageError
from ctl.hardware import cluster


def workers(launcher: int) -> dict[str, int]:
    """The processes of a launcher that run now.

    Args:
        launcher: its pid.

    Returns:
        Name, as the launcher has it ("worker 1", "chief", "ps 0") -> pid.
    """
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        name = _name(entry, launcher) if entry.name.isdigit() else None
        if name:
            found[name] = int(entry.name)
    return dict(sorted(found.items()))


def drop(launcher: int, name: str) -> int:
    """Kills a process of a launcher, as a machine that goes away does.

    Args:
        launcher: its pid.
        name: of the process, such as "worker 1".

    Returns:
        The pid that it had.

    Raises:
        UsageError: there is no such process.
    """
    pid = _pid(launcher, name)
    os.kill(pid, signal.SIGKILL)
    return pid


def delay(launcher: int, name: str, *, seconds: float) -> int:
    """Makes a process of a launcher stand still, as a machine that is overloaded does.

    Args:
        launcher: its pid.
        name: of the process, such as "worker 1".
        seconds: how long; this call takes as long.

    Returns:
        Its pid.

    Raises:
        UsageError: there is no such process.
    """
    pid = _pid(launcher, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return pid


def _pid(launcher: int, name: str) -> int:
    found = workers(launcher)
    if name not in found:
        raise UsageError(
            f"There is no {name!r} among the processes of {launcher}: "
            f"{', '.join(found) or 'it has none that run'}."
        )
    return found[name]


def _name(entry: pathlib.Path, launcher: int) -> str | None:
    """The name in its run of a process, if the launcher started it."""
    try:
        # The command, in brackets, may have spaces and brackets in it.
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        if parent != launcher:
            return None
        variables = (entry / "environ").read_bytes().split(b"\0")
    except (OSError, IndexError):  # it has ended since
        return None
    for variable in variables:
        key, _, value = variable.partition(b"=")
        if key == b"TF_CONFIG":
            task = json.loads(value)["task"]
            return cluster.task_name(task["type"], task["index"])
    return None
