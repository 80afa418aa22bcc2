"""The local folder of a run in an object store, and the record of what it is a copy of."""

from collections.abc import Callable, Iterable
import hashlib
import os
import pathlib
import re
import shutil
from typing import Any

from ctl.errors import UsageError
from ctl.loop import json_files, lock
from ctl.loop.bucket.store import open_folder
from ctl.loop.store import RECORD

HELD = ".upload"  # the folder of the files that are being copied
_OWN_FILES = {RECORD, json_files.temporary_name(RECORD), lock.NAME}


def folder_of(url: str, part: str) -> pathlib.Path:
    """Returns the local folder of a URL, in the user's cache.

    Args:
        url: the folder of a run.
        part: "train", "worker-<n>", or "read" for a copy that no run writes to.
    """
    url = url.rstrip("/")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]  # different URLs may become the same text
    name = f"{re.sub('[^A-Za-z0-9.]+', '-', url)[-60:]}-{digest}"
    return pathlib.Path(
        cache, "ctl", "runs", name, part, url.rpartition("/")[2].strip(".") or "run"
    )


class LocalCopy:
    """The local folder of a run in an object store, and which of its files are there.

    Its file `.bucket.json` names the owner for which the folder is up to date. As long as the bucket
    has no later owner, the folder has everything that the bucket has, and maybe more.

    Args:
        url: the folder of the run in the store.
        folder: the local folder, which need not exist.

    Attributes:
        store: the folder in the store.
        folder: the same.
        sent: name of a file -> its size and time when it was copied to the store.

    Raises:
        UsageError: there is no package for the URL's scheme.
    """

    def __init__(self, url: str, folder: pathlib.Path):
        self.store, self.folder = open_folder(url), folder
        self.sent: dict[str, Any] = {}

    def is_current(self, owner: int) -> bool:
        """Returns whether no other process has written to the bucket since; reads `sent`.

        Raises:
            UsageError: the folder holds something else.
        """
        path, url = self.folder / RECORD, self.store.url
        record = json_files.read(path) if path.exists() else {}
        if record.get("url") != url and (record or self._names()):
            raise UsageError(
                f"{self.folder} is the local folder of {url}, but has "
                f"{record.get('url', 'files that are not a copy of it')}: set train.local_dir to an "
                "empty folder."
            )
        self.sent = dict(record.get("sent", {}))
        return record.get("owner") == owner

    def clear(self) -> None:
        """Removes the files of an earlier time."""
        self.sent = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write(owner=-1)  # so that a kill leaves a folder that is known not to be complete
        for path in (self.folder / name for name in self._names()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write(self, owner: int) -> None:
        """Records that the folder is up to date for an owner."""
        record = {"url": self.store.url, "owner": owner, "sent": self.sent}
        json_files.replace(self.folder / RECORD, record)

    def mark_sent(self, pattern: str = "**/*") -> None:
        """Records that files are in the store, as after they were fetched."""
        self.sent |= {self._name(p): signature(p) for p in self.changed(self.folder.glob(pattern))}

    def changed(self, paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
        """Returns the files that are not in the store as they are now."""
        files = (path for path in paths if path.is_file())
        return [path for path in files if self.sent.get(self._name(path)) != signature(path)]

    def send(self, paths: Iterable[pathlib.Path]) -> None:
        """Copies the changed ones of some files to the store, also if they grow meanwhile.

        Raises:
            OSError: one has arrived with another size.
        """
        for path in self.changed(paths):
            name, seen = self._name(path), signature(path)
            copy = self.hold([path], shutil.copyfile) / path.name
            self.store.upload(copy, name)
            if (arrived := self.store.size(name)) != copy.stat().st_size:
                raise OSError(f"{name} has {arrived} bytes, not {copy.stat().st_size}")
            self.sent[name] = seen

    def hold(self, paths: Iterable[pathlib.Path], copy: Callable[[Any, Any], Any]) -> pathlib.Path:
        """Returns a folder of files that do not change and are not deleted until the next call."""
        held = self.folder / HELD
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        for path in paths:
            copy(path, held / path.name)
        return held

    def _name(self, path: pathlib.Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _names(self) -> set[str]:
        return set(os.listdir(self.folder) if self.folder.is_dir() else ()) - _OWN_FILES


def signature(path: pathlib.Path) -> list[int] | None:
    """Returns what changes with a file's content; None if the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
