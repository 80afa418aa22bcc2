"""A folder outside of this machine: what a run requires of a store, and the stores of fsspec."""

import abc
from collections.abc import Callable, Iterable
import contextlib
import os
import pathlib
import time
from typing import Any, TypeVar
import uuid

from ctl.configs.loading import load
from ctl.errors import Failure, UsageError, print_line
from ctl.hardware.file_systems import one_line, open_url
from ctl.loop.store import STORES

_T = TypeVar("_T")
# The requests of an upload. The defaults of s3fs (50 MiB, 10 at the same time) take more memory, and a
# third more processor time, since Python gets buffers of more than 32 MiB from the system each time.
_PARTS = {"chunksize": 2**24, "max_concurrency": 4}
_MOST_BYTES = 10_000 * 2**24  # S3 accepts 10,000 parts; the file systems choose larger ones
# Object stores, in which a name has no folder: their clients would make a bucket.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")
# Seconds between the tries of a request that the start of a run depends on.
_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A retry does not help: the name is wrong, or permission or credentials are missing.
_PERMANENT = {
    "FileNotFoundError", "PermissionError", "NoCredentialsError", "DefaultCredentialsError",
    "ParamValidationError", "InvalidRegionError",
}  # fmt: skip


def open_folder(url: str) -> "Store":
    """Opens a folder of a store, by the row of the URL's scheme in `ctl.loop.store.STORES`.

    Raises:
        UsageError: there is no package for the URL's scheme.
    """
    found = STORES.get(url.partition(":")[0], STORES[""])
    return (load(found) if isinstance(found, str) else found)(url)


class Store(abc.ABC):
    """A folder of a store. Names are relative to it, and may have slashes.

        store = open_folder("gs://bucket/run")
        store.write("config.json", b"{}")
        store.list()                                    # {"config.json": 2}

        class Shelf(ctl.Store, scheme="shelf"):         # opens URLs such as shelf://a/run

    A method may raise any error: the request is tried again, after `connect`.

    Args:
        url: the folder.
    """

    def __init_subclass__(cls, *, scheme: str = "", **arguments: Any):
        super().__init_subclass__(**arguments)
        if scheme:
            STORES[scheme] = cls

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.retry(self.connect)

    def connect(self) -> None:  # noqa: B027
        """Makes a new client, which reads the credentials again."""

    @abc.abstractmethod
    def list(self, folder: str = "") -> dict[str, int]:
        """Returns the names below a folder, relative to it, with their sizes in bytes."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """Returns the content of an object; None if it does not exist."""

    @abc.abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Replaces an object."""

    @abc.abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Writes an object that must not exist; returns False if it does.

        If two processes call it at the same time, only one of them may get True.
        """

    @abc.abstractmethod
    def upload(self, path: pathlib.Path, name: str) -> None:
        """Copies a local file to the store."""

    @abc.abstractmethod
    def download(self, name: str, path: pathlib.Path) -> bool:
        """Copies an object to a local file, completely or not at all; False if it does not exist."""

    def size(self, name: str) -> int:
        """Returns the size of an object in bytes; -1 if it does not exist."""
        folder, _, own = name.rpartition("/")
        return self.list(folder).get(own, -1)

    @abc.abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Deletes objects, in order; those that do not exist are skipped."""

    def retry(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Calls a function that the start of a run depends on, again after an error that may pass.

        Raises:
            UsageError: the URL or the permissions are wrong.
            Failure: the store does not answer.
        """
        is_lost = False
        for delay in (*_DELAYS, 0.0):
            try:
                if is_lost:
                    self.connect()
                return call(*arguments)
            except (UsageError, Failure):
                raise
            except Exception as error:
                reason = one_line(error)
                if type(error).__name__ in _PERMANENT:
                    raise UsageError(
                        f"{self.url} cannot be used ({reason}): check the name, the permissions and "
                        "the credentials."
                    ) from None
                if not delay:
                    raise Failure(
                        f"{self.url} cannot be reached ({reason}): rerun the same command."
                    ) from None
                print_line(f"{self.url}: {reason}; trying again in {delay:.0f} s.")
                time.sleep(delay)
                is_lost = True
        raise AssertionError


class FileSystem(Store):
    """A folder of a file system or an object store of fsspec.

    Raises:
        UsageError: there is no package for the URL's scheme.
    """

    def connect(self) -> None:
        """Opens the file system again."""
        self._fs, self._root = open_url(self.url)
        self._made: set[str] = set()  # folders

    def list(self, folder: str = "") -> dict[str, int]:
        """Finds the files below a folder."""
        self._fs.invalidate_cache()
        path = self._path(folder)
        with contextlib.suppress(FileNotFoundError):
            found = self._fs.find(path, detail=True)
            return {name[len(path) :].lstrip("/"): info["size"] for name, info in found.items()}
        return {}

    def size(self, name: str) -> int:
        """Asks for one file."""
        self._fs.invalidate_cache()
        return self._fs.info(self._path(name))["size"]

    def read(self, name: str) -> bytes | None:
        """Reads a file."""
        with contextlib.suppress(FileNotFoundError):
            return self._fs.cat_file(self._path(name))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file."""
        self._fs.pipe_file(self._path_in_folder(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Creates a file.

        Whether two processes can both succeed depends on the store: those with preconditions
        (if-none-match in S3, if-generation-match in Google Cloud) let one of them.
        """
        try:
            self._fs.pipe_file(self._path_in_folder(name), content, mode="create")
        except Exception as error:
            # The file systems translate the status of a failed precondition differently.
            texts = ("FileExistsError", "412", "409", "PreconditionFailed", "Conflict")
            if not any(text in repr(error) for text in texts):
                raise
            return False
        return True

    def upload(self, path: pathlib.Path, name: str) -> None:
        """Copies a local file."""
        has_parts = self.url.startswith(("s3", "gs:", "gcs:"))
        options = _PARTS if has_parts and path.stat().st_size < _MOST_BYTES else {}
        self._fs.put_file(str(path), self._path_in_folder(name), **options)

    def download(self, name: str, path: pathlib.Path) -> bool:
        """Copies to a temporary file, and renames it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
        try:
            self._fs.get_file(self._path(name), str(temporary))
            os.replace(temporary, path)
        except FileNotFoundError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Deletes files."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def _path_in_folder(self, name: str) -> str:
        """Returns the path of a file, whose folder exists, if the file system has folders."""
        path = self._path(name)
        folder = path.rpartition("/")[0]
        if folder not in self._made and self.url.partition(":")[0] not in _BUCKETS:
            self._fs.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        return path
