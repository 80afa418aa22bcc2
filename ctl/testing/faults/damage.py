"""Damages the files of a checkpoint as an interrupted copy, a bad disk or a kill does."""

import os
import pathlib

from ctl.errors import UsageError
from ctl.loop.checkpoints.files import CheckpointFiles

Folder = str | pathlib.Path
_SUFFIXES = {"data": ".data-*", "index": ".index", "marker": ".whole"}


def truncate(folder: Folder, step: int, part: str = "data", *, keep: int = 100) -> pathlib.Path:
    """Truncates a file of a checkpoint.

    Args:
        folder: the folder of the checkpoints.
        step: step of the checkpoint.
        part: "data", "index" or "marker".
        keep: number of bytes to keep, less than the size of the file.

    Returns:
        The path of the file.

    Raises:
        UsageError: there is no such file, or it has no more than `keep` bytes.
    """
    path = _file(folder, step, part)
    if path.stat().st_size <= keep:
        raise UsageError(f"{path} has {path.stat().st_size} bytes: keep must be less.")
    os.truncate(path, keep)
    return path


def delete(folder: Folder, step: int, part: str = "data") -> pathlib.Path:
    """Deletes a file of a checkpoint; see `truncate` for the arguments and the result."""
    path = _file(folder, step, part)
    path.unlink()
    return path


def flip(
    folder: Folder, step: int, part: str = "data", *, at: int | None = None, count: int = 1
) -> pathlib.Path:
    """Inverts bytes of a checkpoint's file without changing its size.

    Args:
        folder: the folder of the checkpoints.
        step: step of the checkpoint.
        part: "data", "index" or "marker".
        at: position of the first byte; the middle of the file by default.
        count: number of bytes.

    Returns:
        The path of the file.

    Raises:
        UsageError: there is no such file, or it is too short.
    """
    path = _file(folder, step, part)
    content = bytearray(path.read_bytes())
    first = len(content) // 2 if at is None else at
    if not 0 <= first < first + count <= len(content):
        raise UsageError(
            f"{path} has {len(content)} bytes, but flipping {count} from byte {first} requires "
            f"{first + count}."
        )
    content[first : first + count] = bytes(byte ^ 0xFF for byte in content[first : first + count])
    path.write_bytes(content)
    return path


def leave_unfinished(folder: Folder, step: int) -> pathlib.Path:
    """Creates the temporary folder, with half of the data, that a kill during a save leaves.

    Args:
        folder: the folder of the checkpoints.
        step: step of the unfinished checkpoint.

    Returns:
        The path of the temporary folder.
    """
    temporary = pathlib.Path(CheckpointFiles(folder).path(step) + "_temp")
    temporary.mkdir(parents=True)
    (temporary / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    return temporary


def _file(folder: Folder, step: int, part: str) -> pathlib.Path:
    if part not in _SUFFIXES:
        raise UsageError(f"part is {part!r}, but must be one of {', '.join(map(repr, _SUFFIXES))}.")
    prefix = pathlib.Path(CheckpointFiles(folder).path(step))
    paths = sorted(prefix.parent.glob(prefix.name + _SUFFIXES[part]))
    if not paths:
        raise UsageError(f"{prefix} has no {part} file: choose a step that has a checkpoint.")
    return paths[0]
