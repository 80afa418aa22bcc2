"""Reads and writes JSON files so that a killed process or a full disk leaves no partial content."""

from collections.abc import Iterable, Mapping
import contextlib
import errno
import io
import json
import os
import pathlib
from typing import Any

from ctl.errors import UsageError
from ctl.hardware.file_systems import create
from ctl.loop.disk import flush

_MOST_DIGITS = 20  # of an integer; more are damage, which no number of the machine can hold
_MISTAKES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class NotAnObject(ValueError):
    """Raised for JSON that is no object, and so was not written by ctl."""


def parse(content: bytes | str, **types: Any) -> dict[str, Any]:
    """Returns the JSON object in a text that may be damaged.

    Args:
        content: the text.
        **types: the type that an entry must have, such as `step=int`, or `best=dict | None` if it may
            be missing.

    Raises:
        ValueError: it is something else; the message is a clause.
    """
    try:
        value = json.loads(content, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise NotAnObject("it is not a JSON object")
    for name, expected in types.items():
        if not isinstance(value.get(name), expected):
            raise ValueError(f"{name} is {type(value.get(name)).__name__}")
    return value


def read(path: pathlib.Path, **types: Any) -> dict[str, Any]:
    """Returns the JSON object in a file; `parse` describes `types`.

    Raises:
        UsageError: the file does not exist, or contains something else.
        OSError: the disk fails.
    """
    try:
        return parse(path.read_bytes(), **types)
    except (OSError, ValueError) as error:
        of_disk = isinstance(error, OSError) and not isinstance(error, _MISTAKES)
        if of_disk and getattr(error, "errno", None) != errno.ELOOP:  # of a link to itself
            raise
        raise UsageError(f"{path} cannot be read ({error}): fix it, or use --fresh.") from None


def read_lines(path: pathlib.Path, **types: Any) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file, one per line; `parse` describes `types`.

    Other lines, such as those that a kill cut short, are skipped.
    """
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(parse(text, **types))
    return lines


def replace(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file by an object, as `replace_text` does."""
    replace_text(path, [json.dumps(content, indent=2), "\n"])


def replace_text(path: pathlib.Path, texts: Iterable[str]) -> None:
    """Replaces a file by texts, completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # Written next to the file, then renamed: a kill leaves the old content or the new one.
    temporary = path.with_name(temporary_name(path.name))
    try:
        with create(temporary) as file:
            file.writelines(texts)
        flush(temporary)  # or a power failure could leave an empty file
        os.replace(temporary, path)
        flush(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # to free the space on a full disk
        raise


def temporary_name(name: str) -> str:
    """Returns the name that `replace` writes a file under before it renames it."""
    return f".{name}.new"


def append_text(path: pathlib.Path, text: str) -> None:
    """Appends text to a file, completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # Unbuffered: the text must be in the file when the process is killed later.
    with open(path, "a+b", buffering=0) as file:
        _append(file, b"\n" * _is_cut_short(file) + text.encode())


def _is_cut_short(file: io.FileIO) -> bool:
    """Returns whether a kill has left a last line without its end, which would swallow the next one."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _append(file: io.FileIO, line: bytes) -> None:
    end = file.seek(0, os.SEEK_END)
    try:
        # A full disk takes the first bytes of a line without an error.
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def _parse_int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number is too large")
    return int(text)
