"""Marks complete checkpoints, and lists the checkpoints of a folder.

After the files of a checkpoint, a marker `ckpt-<step>.whole` is written, which lists their sizes. A
checkpoint whose marker is missing or does not match is skipped, no matter what cut its files short: a
kill, a full disk, or the user. The marker also holds the notes of a checkpoint: data that is not a
variable, such as the states of actions. If something cannot be written, the message names the
checkpoint that is intact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

from ctl.errors import Failure
from ctl.hardware.file_systems import create

_NAME = re.compile(r"ckpt-(\d+)(\.(?:index|data-\d{5}-of-\d{5}|whole)|_temp)")
MARKER = ".whole"
_UNFINISHED = "it was not written to the end"
_REASONS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Permission denied",
    re.IGNORECASE,
)
# TensorFlow's errors of a full or read-only disk, if the message has none of these reasons.
_ERRORS = ("ResourceExhaustedError", "PermissionDeniedError")


class CheckpointFiles:
    """The checkpoints in a folder, which need not exist.

    files = CheckpointFiles("runs/mine/checkpoints")
    files.commit(500)                               # all files of the checkpoint are written
    files.steps()                                   # [..., 500]
    """

    def __init__(self, directory: str | pathlib.Path):
        self._directory = pathlib.Path(directory)

    def path(self, step: int) -> str:
        """Returns the prefix of a checkpoint's files."""
        return str(self._directory / f"ckpt-{step}")

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending."""
        return [step for step in sorted(self._files()) if self.fault(step) is None]

    def faults(self) -> dict[int, str]:
        """Returns the faults of the checkpoints that are not complete, by step."""
        faults = {step: self.fault(step) for step in sorted(self._files())}
        return {step: fault for step, fault in faults.items() if fault}

    def damaged(self) -> list[int]:
        """Returns the steps of the checkpoints that were complete, but no longer are."""
        return [step for step, fault in self.faults().items() if fault != _UNFINISHED]

    def fault(self, step: int) -> str | None:
        """Returns what is wrong with a checkpoint, or None."""
        marker = pathlib.Path(self.path(step) + MARKER)
        try:
            content = marker.read_bytes() if marker.exists() else None
        except OSError:
            content = b""

        def size_of(name: str) -> int | None:
            try:
                return (self._directory / name).stat().st_size
            except OSError:
                return None

        return find_fault(content, size_of)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes that `commit` recorded for a checkpoint; {} if there are none."""
        try:
            return dict(json.loads(pathlib.Path(self.path(step) + MARKER).read_text())["notes"])
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def commit(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Marks a checkpoint as complete. All its files must have been written.

        Args:
            step: the checkpoint.
            notes: what to record with it, in JSON types.
        """
        files = [path for path in self._files()[step] if path.suffix != MARKER]
        # The files reach the disk before the marker: after a power failure there must be no marker
        # of files that are missing.
        for path in (*files, self._directory):
            flush(path)
        marker = pathlib.Path(self.path(step) + MARKER)
        temporary = marker.with_suffix(".new")
        content: dict[str, Any] = {"files": {p.name: p.stat().st_size for p in files}}
        with create(temporary) as file:
            file.write(json.dumps({**content, "notes": dict(notes)} if notes else content))
        flush(temporary)
        os.replace(temporary, marker)
        flush(self._directory)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint."""
        # The marker first, so that a kill in between leaves no checkpoint that seems complete.
        for path in self._files().get(step, []):
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def prune(
        self, *, keep: int, keep_every: int, rank: Callable[[int], Any] | None = None
    ) -> None:
        """Deletes old checkpoints, and incomplete ones.

        Args:
            keep: how many of the last complete checkpoints to keep.
            keep_every: also keep those at multiples of this number of steps; 0 for none.
            rank: the key that orders the steps; by default the step.
        """
        for step in old_steps(self.steps(), self.faults(), keep, keep_every, rank):
            self.remove(step)

    def _files(self) -> dict[int, list[pathlib.Path]]:
        """Returns the files of each checkpoint, by step."""
        names = os.listdir(self._directory) if self._directory.is_dir() else ()
        return {
            step: [self._directory / name for name in files]
            for step, files in group_by_step(names).items()
        }


def find_fault(marker: bytes | None, size_of: Callable[[str], int | None]) -> str | None:
    """Returns what is wrong with a checkpoint, or None.

    Args:
        marker: the content of its marker; None if there is none.
        size_of: returns the bytes of a file; None if it does not exist.
    """
    if marker is None:
        return _UNFINISHED
    try:
        sizes = {str(name): int(size) for name, size in json.loads(marker)["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its marker cannot be read"
    # Sizes, not checksums: reading every byte at each start would take minutes for a large model.
    # TensorFlow checks its own checksums when it reads.
    for name, size in sizes.items():
        if not _NAME.fullmatch(name):  # a marker of a store may come from anyone
            return f"its marker names {name!r}, which is no file of a checkpoint"
        actual = size_of(name)
        if actual is None:
            return f"{name} is missing"
        if actual != size:
            return f"{name} has {actual} bytes, not {size}"
    return None if sizes else "its marker lists no files"


def group_by_step(names: Iterable[str]) -> dict[int, list[str]]:
    """Returns the names of checkpoints' files by step, the marker first; leaves out other names."""
    files: dict[int, list[str]] = {}
    for name in sorted(names, key=lambda name: not name.endswith(MARKER)):
        if match := _NAME.fullmatch(name):
            files.setdefault(int(match[1]), []).append(name)
    return files


def old_steps(
    complete: Iterable[int],
    incomplete: Iterable[int],
    keep: int,
    keep_every: int,
    rank: Callable[[int], Any] | None = None,
) -> list[int]:
    """Returns the checkpoints that `CheckpointFiles.prune` deletes, of these; it has the arguments."""
    ranked = sorted(complete, key=rank)
    newest = max(ranked, default=0)
    old = [step for step in ranked[:-keep] if not keep_every or step % keep_every]
    # A newer incomplete one may still be being written.
    return old + [step for step in incomplete if step < newest]


def find_files(name: str) -> CheckpointFiles:
    """Returns the checkpoints of a run's workdir, or of a folder of checkpoints."""
    inner = pathlib.Path(name, "checkpoints")
    return CheckpointFiles(inner if inner.is_dir() else name)


def read_notes(path: str) -> dict[str, Any]:
    """Returns the notes that were recorded for the checkpoint at a path; {} if there are none."""
    folder, _, name = path.rpartition("/")
    step = name.removeprefix("ckpt-")
    return CheckpointFiles(folder or ".").notes(int(step)) if step.isdecimal() else {}


def flush(path: pathlib.Path) -> None:
    """Waits until the content of a file or folder is on the disk."""
    # A folder must be flushed, too: its entry for a new file is written separately.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        files = CheckpointFiles(checkpoints or "")
        steps = files.steps() if checkpoints else []
        intact = "No checkpoint exists yet."
        if steps:
            intact = f"The last complete checkpoint, {files.path(steps[-1])}, is intact."
        full = re.search("space|quota|exhausted", reason, re.IGNORECASE)
        fix = "Free some space" if full else "Make it writable"
        raise Failure(
            f"{what} could not be written: {reason}. {intact} {fix}, then rerun the same command."
        ) from error


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
