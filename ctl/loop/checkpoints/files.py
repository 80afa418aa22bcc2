"""Which checkpoints of a folder were written to the end. Loads no TensorFlow.

A checkpoint's files are followed by a marker, `ckpt-<step>.whole`, that lists their sizes. Whatever a
kill, a full disk or a person does to the files before or after: without a marker that fits, a
checkpoint is passed over.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil

_NAME = re.compile(r"ckpt-(\d+)(\.(?:index|data-\d{5}-of-\d{5}|whole)|_temp)")
_MARKER = ".whole"
_UNFINISHED = "it was not written to the end"


class CheckpointFiles:
    """The checkpoints of a folder.

    commits = Commits("runs/mine/checkpoints")
    commits.commit(500)                             # its files are all there
    commits.steps()                                 # [..., 500]
    """

    def __init__(self, directory: str | pathlib.Path):
        """Names the folder, which need not exist."""
        self._directory = pathlib.Path(directory)

    def path(self, step: int) -> str:
        """The prefix of a checkpoint's files."""
        return str(self._directory / f"ckpt-{step}")

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        return [step for step in sorted(self._files()) if self.fault(step) is None]

    def faults(self) -> dict[int, str]:
        """Step -> what is wrong with its checkpoint, of those that are not whole."""
        found = {step: self.fault(step) for step in sorted(self._files())}
        return {step: fault for step, fault in found.items() if fault}

    def damaged(self) -> list[int]:
        """The steps of the checkpoints that were whole once and are not now."""
        return [step for step, fault in self.faults().items() if fault != _UNFINISHED]

    def fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint, or None."""
        try:
            marker = json.loads(pathlib.Path(self.path(step) + _MARKER).read_text())
            sizes = {str(name): int(size) for name, size in marker["files"].items()}
        except FileNotFoundError:
            return _UNFINISHED
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return "its marker cannot be read"
        for name, size in sizes.items():
            try:
                found = (self._directory / name).stat().st_size
            except OSError:
                return f"{name} is missing"
            if found != size:
                return f"{name} has {found} bytes, not {size}"
        return None if sizes else "its marker lists no files"

    def commit(self, step: int) -> None:
        """Says that a checkpoint's files are all written, once they are on the disk."""
        files = [path for path in self._files()[step] if path.suffix != _MARKER]
        for path in (*files, self._directory):
            _flush(path)
        marker = pathlib.Path(self.path(step) + _MARKER)
        temporary = marker.with_suffix(".new")
        temporary.write_text(json.dumps({"files": {p.name: p.stat().st_size for p in files}}))
        _flush(temporary)
        os.replace(temporary, marker)
        _flush(self._directory)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, its marker first."""
        for path in sorted(self._files().get(step, []), key=lambda p: p.suffix != _MARKER):
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def prune(self, *, keep: int, keep_every: int) -> None:
        """Deletes all whole checkpoints but the newest ones, and what was never written to the end.

        Args:
            keep: how many of the newest to keep.
            keep_every: keep those at multiples of so many steps too; 0 for none.
        """
        whole = self.steps()
        newest = whole[-1] if whole else 0
        for step in whole[:-keep]:
            if not keep_every or step % keep_every:
                self.remove(step)
        for step in self.faults():
            if step < newest:  # a newer one may be on its way
                self.remove(step)

    def _files(self) -> dict[int, list[pathlib.Path]]:
        found: dict[int, list[pathlib.Path]] = {}
        names = os.listdir(self._directory) if self._directory.is_dir() else []
        for name in names:
            match = _NAME.fullmatch(name)
            if match:
                found.setdefault(int(match[1]), []).append(self._directory / name)
        return found


def _flush(path: pathlib.Path) -> None:
    """Has the disk hold what was written; a marker must not outlive the files through a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
