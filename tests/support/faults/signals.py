"""Finds the processes that `ctl.launch` started. Linux only."""

import contextlib
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
        with contextlib.suppress(OSError, IndexError):  # it may have ended meanwhile
            # The command precedes the parent's pid in parentheses, and may contain spaces and ")".
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"TF_CONFIG="):
                    task = json.loads(variable.partition(b"=")[2])["task"]
                    pids[cluster.task_name(task["type"], task["index"])] = int(folder.name)
    return dict(sorted(pids.items()))
