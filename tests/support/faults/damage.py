"""Damages the files of a checkpoint as an interrupted copy, a bad disk or a kill does."""

import os
import pathlib

from ctl.loop.checkpoints.files import CheckpointFiles

Folder = str | pathlib.Path
DATA = ".data-00000-of-00001"


def truncate(folder: Folder, step: int, suffix: str = DATA) -> pathlib.Path:
    """Cuts off the second half of a file of a checkpoint.

    Args:
        folder: the folder of the checkpoints.
        step: step of the checkpoint.
        suffix: the end of the file's name: `DATA`, ".index" or ".whole".

    Returns:
        The path of the file.
    """
    path = pathlib.Path(CheckpointFiles(folder).path(step) + suffix)
    os.truncate(path, path.stat().st_size // 2)
    return path


def flip(folder: Folder, step: int, suffix: str = DATA) -> pathlib.Path:
    """Inverts the byte in the middle of a file of a checkpoint, without changing its size.

    See `truncate` for the arguments and the result.
    """
    path = pathlib.Path(CheckpointFiles(folder).path(step) + suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    return path


def leave_unfinished(folder: Folder, step: int) -> None:
    """Creates the temporary folder, with half of the data, that a kill during a save leaves."""
    temporary = pathlib.Path(CheckpointFiles(folder).path(step) + "_temp")
    temporary.mkdir(parents=True)
    (temporary / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
