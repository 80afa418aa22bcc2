"""Tells in one line what could not be written, and what is safe all the same. Loads no TensorFlow."""

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
_ERRORS = ("ResourceExhaustedError", "PermissionDeniedError")  # TensorFlow's of a full or shut disk


@contextlib.contextmanager
def report_write_errors(what: str, checkpoints: str | pathlib.Path | None) -> Iterator[None]:
    """Turns an error of the disk, the operating system's or TensorFlow's, into a `Failure`.

    Only what writes may stand in the block: a person's data may have files that cannot be read, too.

    Args:
        what: what is written, as a person knows it.
        checkpoints: the folder of the run's checkpoints, if it has one.
    """
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise Failure(_told(what, reason, checkpoints)) from error


def last_checkpoint(folder: str | pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint that was saved whole; None where there is none."""
    files = CheckpointFiles(folder)
    steps = files.steps()
    return pathlib.Path(files.path(steps[-1])) if steps else None


def _reason(error: Exception) -> str | None:
    """Why something could not be written; None where the error is of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if not type(error).__module__.startswith("tensorflow."):
        return None
    found = _REASONS.search(str(error))
    if found:
        return found[0]
    return str(error).splitlines()[0] if type(error).__name__ in _ERRORS else None


def _told(what: str, reason: str, checkpoints: str | pathlib.Path | None) -> str:
    full = re.search("space|quota|exhausted", reason, re.IGNORECASE)
    mend = "Make room" if full else "Make it writable"
    path = last_checkpoint(checkpoints) if checkpoints else None
    safe = (
        f"The last good checkpoint, {path}, is intact." if path else "No checkpoint is there yet."
    )
    return f"{what} could not be written: {reason}. {safe} {mend}, then run me again."
