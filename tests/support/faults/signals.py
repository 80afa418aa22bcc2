"""Finds the processes that `ctl.launch` started. Linux only."""

import json
import pathlib

from ctl.hardware import cluster


def workers(launcher: int) -> dict[str, int]:
    """Finds the running processes of a launcher.

    Args:
        launcher: pid of the launcher.

    Returns:
        Task name as printed by the launcher ("worker 1", "chief", "ps 0") -> pid.
    """
    pids = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        name = _task_name(folder, launcher)
        if name:
            pids[name] = int(folder.name)
    return dict(sorted(pids.items()))


def _task_name(folder: pathlib.Path, launcher: int) -> str | None:
    """Returns the task name of a process in /proc, or None if the launcher did not start it."""
    try:
        # The command precedes the parent's pid in parentheses, and may contain spaces and ")".
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        if parent != launcher:
            return None
        variables = (folder / "environ").read_bytes().split(b"\0")
    except (OSError, IndexError):  # the process has ended meanwhile
        return None
    for variable in variables:
        key, _, value = variable.partition(b"=")
        if key == b"TF_CONFIG":
            task = json.loads(value)["task"]
            return cluster.task_name(task["type"], task["index"])
    return None
