"""Damages the files of a checkpoint as an interrupted copy, a bad disk or a kill does."""

import os
import pathlib

from ctl.errors import UsageError
from ctl.loop.checkpoints.files import CheckpointFiles

Folder = str | pathlib.Path
_SUFFIXES = {"data": ".data-*", "index": ".index", "marker": ".whole"}


def truncate(folder: Folder, step: int, part: str = "data") -> pathlib.Path:
    """Cuts off the second half of a file of a checkpoint.

    Args:
        folder: the folder of the checkpoints.
        step: step of the checkpoint.
        part: "data", "index" or "marker".

    Returns:
        The path of the file.

    Raises:
        UsageError: there is no such file.
    """
    path = _file(folder, step, part)
    os.truncate(path, path.stat().st_size // 2)
    return path


def delete(folder: Folder, step: int, part: str = "data") -> pathlib.Path:
    """Deletes a file of a checkpoint; see `truncate` for the arguments and the result."""
    path = _file(folder, step, part)
    path.unlink()
    return path


def flip(folder: Folder, step: int, part: str = "data") -> pathlib.Path:
    """Inverts the byte in the middle of a file of a checkpoint, without changing its size.

    See `truncate` for the arguments and the result.
    """
    path = _file(folder, step, part)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
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
