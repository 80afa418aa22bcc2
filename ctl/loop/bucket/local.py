"""Names the local folders of runs in an object store, and records what such a folder is a copy of."""

from collections.abc import Mapping
import hashlib
import os
import pathlib
import re
import shutil
from typing import Any

from ctl.errors import UsageError
from ctl.loop import json_files, lock

RECORD = ".bucket.json"


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
    return pathlib.Path(cache, "ctl", "runs", name, part, url.rpartition("/")[2] or "run")


class LocalCopy:
    """The local folder in which a run of an object store trains.

    Its file `.bucket.json` names the owner for which the folder is up to date. As long as the bucket
    has no later owner, the folder has everything that the bucket has, and maybe more.

    Args:
        folder: the folder, which need not exist.
        url: the folder of the run in the store.

    Attributes:
        sent: name of a file -> its size and time when it was copied to the store.
    """

    def __init__(self, folder: pathlib.Path, url: str):
        self._folder = folder
        self._url = url
        self.sent: dict[str, Any] = {}

    def is_current(self, owner: int) -> bool:
        """Returns whether no other process has written to the bucket since; reads `sent`.

        Raises:
            UsageError: the folder holds something else.
        """
        record: Mapping[str, Any] = {}
        if (self._folder / RECORD).exists():
            record = json_files.read(self._folder / RECORD)
        if record.get("url") != self._url:
            other = record.get("url") or "files that are not a copy of it"
            if record or self._names():
                raise UsageError(
                    f"{self._folder} is the local folder of {self._url}, but has {other}: set "
                    "train.local_dir to an empty folder."
                )
        self.sent = dict(record.get("sent", {}))
        return bool(record) and record["owner"] == owner

    def clear(self) -> None:
        """Removes the files of an earlier time."""
        self.sent = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        self.write(owner=-1)  # so that a kill leaves a folder that is known not to be complete
        for name in self._names():
            path = self._folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def mark_sent(self) -> None:
        """Records that all files are in the store, as after they were fetched."""
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        self.sent = {p.relative_to(self._folder).as_posix(): signature(p) for p in files}

    def write(self, owner: int) -> None:
        """Records that the folder is up to date for an owner."""
        record = {"url": self._url, "owner": owner, "sent": self.sent}
        json_files.replace(self._folder / RECORD, record)

    def _names(self) -> set[str]:
        names = set(os.listdir(self._folder)) if self._folder.is_dir() else set()
        return names - {RECORD, json_files.temporary_name(RECORD), lock.NAME}


def signature(path: pathlib.Path) -> list[int] | None:
    """Returns what changes with a file's content; None if the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
