"""Reports in one line what could not be written, and which checkpoint is intact."""

from collections.abc import Iterator
import contextlib
import pathlib
import re

from ctl.errors import Failure
from ctl.loop.checkpoints.files import CheckpointFiles

_REASONS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied",
    re.IGNORECASE,
)
# TensorFlow's errors of a full or read-only disk, if the message has none of these reasons.
_ERRORS = ("ResourceExhaustedError", "PermissionDeniedError")


@contextlib.contextmanager
def report_write_errors(what: str, checkpoints: str | pathlib.Path | None) -> Iterator[None]:
    """Turns an error of the disk, from the operating system or TensorFlow, into a `Failure`.

    The block must only write: errors of reading the user's data are of the same types.

    Args:
        what: what is written, for the message.
        checkpoints: the folder of the run's checkpoints, if it has one.
    """
    try:
        yield
    except Exception as error:
        reason = _find_reason(error)
        if reason is None:
            raise
        raise Failure(_format_message(what, reason, checkpoints)) from error


def _find_reason(error: Exception) -> str | None:
    """Returns why something could not be written; None for an error of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # Checks the name of the module, since TensorFlow need not be imported.
    if not type(error).__module__.startswith("tensorflow."):
        return None
    # The types vary with the operation: a full disk is ResourceExhausted or Unknown.
    match = _REASONS.search(str(error))
    if match:
        return match[0]
    return str(error).splitlines()[0] if type(error).__name__ in _ERRORS else None


def _format_message(what: str, reason: str, checkpoints: str | pathlib.Path | None) -> str:
    full = re.search("space|quota|exhausted", reason, re.IGNORECASE)
    fix = "Free some space" if full else "Make it writable"
    files = CheckpointFiles(checkpoints) if checkpoints else None
    steps = files.steps() if files else []
    intact = "No checkpoint exists yet."
    if files and steps:
        intact = f"The last complete checkpoint, {files.path(steps[-1])}, is intact."
    return f"{what} could not be written: {reason}. {intact} {fix}, then rerun the same command."
