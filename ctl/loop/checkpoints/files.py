"""Marks complete checkpoints, and lists the checkpoints of a folder.

Before the files of a checkpoint, an empty `ckpt-<step>.new` is written. After them it lists their sizes,
and is renamed to the marker `ckpt-<step>.whole`. A checkpoint whose marker is missing or does not match
is skipped, no matter what cut its files short: a kill, a full disk, or the user. Only one with a
`.new`, which a run began and did not finish, is ever deleted for that: the others may be repaired, or
belong to another program. A marker that cannot be read at present is an error, not damage. It also
holds the notes of a checkpoint: data that is not a variable, such as the states of actions. If
something cannot be written, the message names the checkpoint that is intact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from ctl.errors import Failure, UsageError
from ctl.loop import json_files
from ctl.loop.disk import find_fix, find_reason, flush

_NAME = re.compile(r"ckpt-(\d+)(\.(?:index|data-\d{5}-of-\d{5}|whole|new)|_temp)")
MARKER = ".whole"
_BEGUN = ".new"  # the marker until all files are written; what has one may be deleted
_UNFINISHED = "it was not written to the end"


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

    def present(self) -> set[int]:
        """Returns the steps of which there is any file."""
        return set(self._files())

    def faults(self) -> dict[int, str]:
        """Returns the faults of the checkpoints that are not complete, by step."""
        faults = {step: self.fault(step) for step in sorted(self._files())}
        return {step: fault for step, fault in faults.items() if fault}

    def damaged(self) -> list[int]:
        """Returns the steps of the checkpoints that were complete, but no longer are."""
        return [step for step, fault in self.faults().items() if fault != _UNFINISHED]

    def fault(self, step: int) -> str | None:
        """Returns what is wrong with a checkpoint, or None.

        Raises:
            OSError: the disk fails, as everywhere in this class.
        """

        def size_of(name: str) -> int | None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return (self._directory / name).stat().st_size
            return None

        return find_fault(self._read_marker(step), size_of)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes that `commit` recorded for a checkpoint; {} if there are none."""
        with contextlib.suppress(ValueError):
            notes: dict[str, Any] = json_files.parse(self._read_marker(step) or b"", notes=dict)
            return dict(notes["notes"])
        return {}

    def begin(self, step: int) -> None:
        """Prepares to write the files of a checkpoint, and deletes what there is of an earlier one.

        Raises:
            UsageError: the folder has checkpoints of another program only, which have no markers.
        """
        files = self.check_foreign()
        pathlib.Path(self.path(step) + _BEGUN).touch()
        self._delete(files.get(step, []))

    def check_foreign(self) -> dict[int, list[pathlib.Path]]:
        """Returns the files; raises UsageError if all checkpoints are of another program."""
        files = self._files()
        names = {step: {path.suffix for path in paths} for step, paths in files.items()}
        foreign = [s for s, n in names.items() if ".index" in n and not n & {MARKER, _BEGUN}]
        if foreign and not any(MARKER in suffixes for suffixes in names.values()):
            raise UsageError(
                f"{self.path(max(foreign))} has no marker of ctl: if an older ctl did not finish its "
                "first save, start with --fresh; if another program has written it, such as "
                "tf.train.CheckpointManager, restore it once by tf.train.Checkpoint, and save into a "
                "new folder."
            )
        return files

    def commit(self, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Marks a checkpoint as complete. All its files must have been written.

        Args:
            step: the checkpoint.
            notes: what to record with it, in JSON types.
        """
        files = [path for path in self._files()[step] if path.suffix not in (MARKER, _BEGUN)]
        # The files reach the disk before the marker: after a power failure there must be no marker
        # of files that are missing.
        for path in (*files, self._directory):
            flush(path)
        marker, temporary = (pathlib.Path(self.path(step) + end) for end in (MARKER, _BEGUN))
        content: dict[str, Any] = {"files": {p.name: p.stat().st_size for p in files}}
        # The start marker stays in its place until it is the marker; a link of someone else does not.
        if temporary.is_symlink():
            temporary.unlink()
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(json.dumps({**content, "notes": dict(notes)} if notes else content))
        flush(temporary)
        os.replace(temporary, marker)
        flush(self._directory)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint."""
        # A kill in between leaves a checkpoint that does not seem complete, and is deleted later.
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path(step) + MARKER, self.path(step) + _BEGUN)
        self._delete(self._files().get(step, []))
        pathlib.Path(self.path(step) + _BEGUN).unlink(missing_ok=True)

    def prune(
        self, *, keep: int, keep_every: int, rank: Callable[[int], Any] | None = None
    ) -> list[int]:
        """Deletes old checkpoints, and those that were begun and not finished.

        Args:
            keep: how many of the last complete checkpoints to keep.
            keep_every: also keep those at multiples of this number of steps; 0 for none.
            rank: the key that orders the steps; by default the step.

        Returns:
            The steps of the complete checkpoints that are left, in that order.
        """
        files = self._files()
        complete = [step for step in sorted(files) if self.fault(step) is None]
        begun = [s for s, paths in files.items() if any(p.suffix == _BEGUN for p in paths)]
        old = old_steps(complete, set(begun) - set(complete), keep, keep_every, rank)
        for step in old:
            self.remove(step)
        return [step for step in sorted(complete, key=rank) if step not in old]

    def _read_marker(self, step: int) -> bytes | None:
        try:
            return pathlib.Path(self.path(step) + MARKER).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return b""

    def _delete(self, paths: Iterable[pathlib.Path]) -> None:
        """Deletes the files of a checkpoint, the marker first, except the one of its beginning."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix != _BEGUN:
                    path.unlink()

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
        sizes = json_files.parse(marker, files=dict)["files"]
    except ValueError:
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


@contextlib.contextmanager
def hold(path: str) -> Iterator[str]:
    """Keeps a checkpoint in a `with` block, also if a run deletes it; yields its path in this process.

    The files stay open, under names in a temporary folder. Only Linux has such names. An error that
    leaves the block has the checkpoint's own path.
    """
    folder, _, name = path.rpartition("/")
    with contextlib.ExitStack() as stack:
        if sys.platform != "linux" or not name.removeprefix("ckpt-").isdecimal():
            yield path
            return
        held = stack.enter_context(tempfile.TemporaryDirectory(prefix="ctl-checkpoint-"))
        for file in pathlib.Path(folder or ".").glob(f"{name}.*"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = stack.enter_context(file.open("rb")).fileno()
                os.symlink(f"/proc/self/fd/{descriptor}", f"{held}/{file.name}")
        try:
            yield f"{held}/{name}"
        except Exception as error:
            texts = (str(each).replace(f"{held}/{name}", path) for each in error.args)
            error.args = tuple(texts) if f"{held}/" in str(error) else error.args
            raise


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
        reason = find_reason(error, writes=True)
        if reason is None:
            raise
        intact = ""
        with contextlib.suppress(OSError):  # what cannot be written may not be readable either
            files = CheckpointFiles(checkpoints or "")
            steps = files.steps() if checkpoints else []
            intact = " No checkpoint exists yet."
            if steps:
                intact = f" The last complete checkpoint, {files.path(steps[-1])}, is intact."
        raise Failure(
            f"{what} could not be written: {reason}.{intact} {find_fix(reason)}, then rerun the same "
            "command."
        ) from error
