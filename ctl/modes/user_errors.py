"""Reports exceptions of the user's code, and the loss of another process, in one line."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import tempfile
import traceback
from typing import Any

from ctl.configs.error_location import error_location, raised_by_library, user_line
from ctl.errors import Failure, LostWorker, UsageError
from ctl.hardware.child_process import TRACEBACK_FOLDER
from ctl.hardware.cluster import Cluster, task_name
from ctl.loop.workdir import Workdir

# Codes of TensorFlow's errors that would recur after a restart: INVALID_ARGUMENT, NOT_FOUND,
# UNIMPLEMENTED.
_PERMANENT_CODES = (3, 5, 12)
TRACEBACK = "traceback.txt"  # in the folder of the run
_PERMANENT_OS_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextlib.contextmanager
def report_user_errors(workdir: Workdir | None) -> Iterator[None]:
    """Turns an exception of the user's code into an error of one line.

    Args:
        workdir: the folder of the run, in which the traceback is kept; None to keep it in the folder
            for temporary files.

    Raises:
        UsageError: the exception is a mistake in the code or in the data.
        Failure: it may not recur, such as a lost connection, so that the run may be restarted.
    """
    try:
        yield
    except (UsageError, Failure, LostWorker):
        raise
    except Exception as error:
        # An exception that ctl itself raises is a bug of ctl, and is printed with its traceback.
        if user_line(error) is None and not raised_by_library(error):
            raise
        line = f"{error_location(error)} (traceback: {_save_traceback(error, workdir)})"
        raise (Failure if _may_succeed_later(error) else UsageError)(line) from error


def _may_succeed_later(error: Any) -> bool:
    if hasattr(error, "error_code") and hasattr(error, "node_def"):  # of a running graph
        return error.error_code not in _PERMANENT_CODES
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT_OS_ERRORS)
    return isinstance(error, MemoryError)


def _save_traceback(error: Exception, workdir: Workdir | None) -> pathlib.Path:
    text = "".join(traceback.format_exception(error))
    if workdir and workdir.writes and (workdir.path / "config.json").exists():
        path = workdir.path / TRACEBACK
        with contextlib.suppress(OSError):  # such as a full disk
            path.write_text(text)
            return path
    # The launcher deletes its processes' own folder for temporary files at its end.
    folder = os.environ.get(TRACEBACK_FOLDER)
    with tempfile.NamedTemporaryFile(
        "w", prefix="ctl-traceback-", suffix=".txt", dir=folder, delete=False
    ) as file:
        file.write(text)
    return pathlib.Path(file.name)


_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")


@contextlib.contextmanager
def report_lost_worker(cluster: Cluster | None) -> Iterator[None]:
    """Turns the error of a broken collective into `LostWorker`.

    Args:
        cluster: the processes of the run; None for a run of one process, whose errors are not changed.

    Raises:
        LostWorker: a collective failed because another process has ended.
    """
    try:
        yield
    except Exception as error:
        if cluster is None or not _is_lost_connection(error):
            raise
        raise LostWorker(
            f"{cluster.name} stops, because {_find_lost_tasks(cluster, str(error))} has ended or cannot "
            "be reached: check it and the network, then start all processes again to continue from the "
            "last checkpoint."
        ) from None


def _is_lost_connection(error: Exception) -> bool:
    import tensorflow as tf

    # The error of a broken connection depends on what this process was doing: sending, receiving,
    # waiting for a peer, or being informed of the failure by the coordination service.
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    )
    # Collectives after the first failure have this text, whatever their error code is.
    aborted = "Collective ops is aborted" in str(error)
    return isinstance(error, kinds) or (isinstance(error, tf.errors.OpError) and aborted)


def _find_lost_tasks(cluster: Cluster, message: str) -> str:
    """Returns the names of the other processes that TensorFlow's message mentions."""
    mentioned = {task_name(role, int(index)) for role, index in _TASK.findall(message)}
    if "CoordinationService/Heartbeat" in message:  # heartbeats go to the first process
        mentioned.add(cluster.members()[0][0])
    return ", ".join(sorted(mentioned & set(cluster.others()))) or "another process"
