"""Describes an error in a user's file by the user's own line, not by a traceback.

Importing this module does not import TensorFlow.
"""

import os
import pathlib
import sysconfig
import traceback

from ctl.configs import overrides
from ctl.errors import UsageError

_CTL = str(pathlib.Path(__file__).resolve().parent.parent) + os.sep
_STANDARD_LIBRARY = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def error_location(error: BaseException, file: pathlib.Path | None = None) -> str:
    """Describes an error in a user's file by one line: "file:line: Type: message".

    The line is the innermost one outside of ctl, Python's library and the installed packages.

    Args:
        error: the exception.
        file: the file that was being read, which is named if the line is not known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_relative(error.filename)}:{error.lineno}"
        return f"{place}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    description = _describe(error)
    if user_frames:
        frame = user_frames[-1]
        return f"{_relative(frame.filename)}:{frame.lineno}: {description}"
    return f"{_relative(str(file))}: {description}" if file else description


def _describe(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return str(error)
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the user's own exception class may have a broken __str__
        lines = []
    return overrides.explain_error(error) or ": ".join([type(error).__name__, *lines[:1]])


def _is_library(filename: str) -> bool:
    if filename.startswith(("<", _CTL, *_STANDARD_LIBRARY)):
        return True
    return any(part in filename for part in _INSTALLED)


def _relative(filename: str) -> str:
    return filename.removeprefix(os.getcwd() + os.sep)
