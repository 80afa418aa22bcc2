"""Reads and writes JSON files so that a killed process or a full disk leaves no partial content."""

from collections.abc import Mapping
import contextlib
import errno
import io
import json
import os
import pathlib
from typing import Any

from ctl.errors import UsageError
from ctl.hardware.file_systems import create
from ctl.loop.checkpoints.files import flush


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        UsageError: the file cannot be read, or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}): fix it, or use --fresh.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object: fix it, or use --fresh.")
    return content


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file, one per line; lines that a kill cut short are skipped."""
    lines: list[Any] = []
    content = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for text in content.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def replace(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file, completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # Written next to the file, then renamed: a kill leaves the old content or the new one.
    temporary = path.with_name(temporary_name(path.name))
    try:
        with create(temporary) as file:
            file.write(json.dumps(content, indent=2) + "\n")
        flush(temporary)  # or a power failure could leave an empty file
        os.replace(temporary, path)
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
