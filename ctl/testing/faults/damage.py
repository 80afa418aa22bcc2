"""Damage to the files of a checkpoint, as a cut-off copy, a bad disk or a kill leaves it."""

import os
import pathlib

from ctl.errors import UsageError
from ctl.loop.checkpoints.files import CheckpointFiles

Folder = str | pathlib.Path
_SUFFIXES = {"data": ".data-*", "index": ".index", "marker": ".whole"}


def truncate(folder: Folder, step: int, part: str = "data", *, keep: int = 100) -> pathlib.Path:
    """Cuts a file of a checkpoint off.

    Args:
        folder: of the checkpoints.
        step: the checkpoint's.
        part: "data", "index" or "marker".
        keep: bytes that are left; fewer than there are.

    Returns:
        The file.

    Raises:
        UsageError: there is no such file, or it is not longer.
    """
    path = _file(folder, step, part)
    if path.stat().st_size <= keep:
        raise UsageError(f"{path} has {path.stat().st_size} bytes: want keep to be less.")
    os.truncate(path, keep)
    return path


def delete(folder: Folder, step: int, part: str = "data") -> pathlib.Path:
    """Removes a file of a checkpoint; arguments and result as of `truncate`."""
    path = _file(folder, step, part)
    path.unlink()
    return path


def flip(
    folder: Folder, step: int, part: str = "data", *, at: int | None = None, count: int = 1
) -> pathlib.Path:
    """Inverts bytes of a checkpoint's file, which keeps its size.

    Args:
        folder: of the checkpoints.
        step: the checkpoint's.
        part: "data", "index" or "marker".
        at: the first byte; that in the middle, if not given.
        count: how many bytes.

    Returns:
        The file.

    Raises:
        UsageError: there is no such file, or it has no such bytes.
    """
    path = _file(folder, step, part)
    content = bytearray(path.read_bytes())
    first = len(content) // 2 if at is None else at
    if not 0 <= first < first + count <= len(content):
        raise UsageError(f"{path} has {len(content)} bytes: want {count} from {first} among them.")
    content[first : first + count] = bytes(byte ^ 0xFF for byte in content[first : first + count])
    path.write_bytes(content)
    return path


def leave_unfinished(folder: Folder, step: int) -> pathlib.Path:
    """Leaves behind what a kill leaves that hits a save: a temporary folder with half the data.

    Args:
        folder: of the checkpoints.
        step: of the checkpoint that was on its way.

    Returns:
        The temporary folder.
    """
    temporary = pathlib.Path(CheckpointFiles(folder).path(step) + "_temp")
    temporary.mkdir(parents=True)
    (temporary / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    return temporary


def _file(folder: Folder, step: int, part: str) -> pathlib.Path:
    if part not in _SUFFIXES:
        raise UsageError(f"part is {part!r}: want one of {', '.join(map(repr, _SUFFIXES))}.")
    prefix = pathlib.Path(CheckpointFiles(folder).path(step))
    found = sorted(prefix.parent.glob(prefix.name + _SUFFIXES[part]))
    if not found:
        raise UsageError(f"{prefix} has no {part} file: name a step that has a checkpoint.")
    return found[0]
