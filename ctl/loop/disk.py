"""Makes files and folders survive a power failure, and recognizes errors of the disk."""

import errno
import glob
import os
import pathlib
import re

from ctl.errors import Failure

_FULL, _DENIED, _CHECK = "Free some space", "Make it writable", "Check the disk"
_FILES = "Allow more open files (ulimit -n)"
# The errors of the operating system that are no mistake in the code, and what to do.
_FIXES = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL, errno.EROFS: _DENIED,
    errno.EACCES: _DENIED, errno.EPERM: _DENIED, errno.EMFILE: _FILES, errno.ENFILE: _FILES,
    errno.EIO: _CHECK, errno.ESTALE: _CHECK, errno.EINTR: _CHECK,
}  # fmt: skip
_TEXTS = {os.strerror(number).lower(): fix for number, fix in _FIXES.items()}
_REASONS = re.compile("|".join(map(re.escape, _TEXTS)), re.IGNORECASE)
# TensorFlow's errors of a full or read-only disk, if the message has none of these reasons.
_ERRORS = ("ResourceExhaustedError", "PermissionDeniedError")
_NODE = re.compile(r"\{\{.*?\}\} *| *\[Op:\w+\]")


def find_reason(error: BaseException, *, writes: bool = False) -> str | None:
    """Returns what the operating system says about an error of a disk; None for another error.

    The types vary: a full disk is OSError, tf.errors.UnknownError, or RuntimeError in h5py.

    Args:
        error: the error.
        writes: whether it was raised where nothing else is done than writing.
    """
    # Checks the name of the module, since TensorFlow need not be imported.
    of_tensorflow = type(error).__module__.startswith("tensorflow.")
    of_system = isinstance(error, OSError)
    is_runtime = isinstance(error, RuntimeError) and not isinstance(error, Failure)
    match = _REASONS.search(getattr(error, "strerror", None) or str(error))
    if match and (is_runtime or of_tensorflow or of_system):
        return match[0]
    if writes and (of_system or type(error).__name__ in _ERRORS):
        text = getattr(error, "strerror", None) or _NODE.sub("", str(error))
        return (text or type(error).__name__).splitlines()[0]
    return None


def find_fix(reason: str) -> str:
    """Returns what to do about the reason of an error."""
    full = re.search("space|quota|exhausted", reason, re.IGNORECASE)
    return _TEXTS.get(reason.lower(), _FULL if full else _DENIED)


def read_failure(path: object, reason: str) -> Failure:
    """Returns the error of a file that cannot be read at present, whatever its content is."""
    fix = find_fix(reason).replace("writable", "readable")
    return Failure(f"{path} cannot be read: {reason}. {fix}, then rerun the same command.")


def check_readable(prefix: str) -> None:
    """Raises OSError if the beginning of a file whose name has this prefix cannot be read."""
    for name in glob.glob(f"{glob.escape(prefix)}.*"):
        with open(name, "rb") as file:
            file.read(2**20)


def flush(path: pathlib.Path) -> None:
    """Waits until the content of a file or folder is on the disk."""
    # A folder must be flushed, too: its entry for a new file is written separately.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: pathlib.Path) -> None:
    """Creates a folder and its parents, with entries that are on the disk; it may exist."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)
