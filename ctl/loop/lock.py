"""Locks a workdir, so that only one run uses it at a time."""

from collections.abc import Mapping
import contextlib
import datetime
import errno
import hashlib
import json
import os
import pathlib
import socket
import time
from typing import TYPE_CHECKING, Any

import filelock

from ctl import errors
from ctl.errors import UsageError, list_some
from ctl.loop import json_files
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.disk import make_folder

if TYPE_CHECKING:  # it imports TensorFlow
    from ctl.hardware.collectives import ProcessGroup

NAME = "run.lock"
# How long to wait for the lock of another host. The server of a shared disk releases the locks of a
# client that died when its lease ends: 90 s by default in Linux (RFC 7530, section 9.5). Without
# the wait, a pod that replaces one on a dead node would end with exit code 2, which
# deploy/kubernetes takes for a mistake of the user that no restart fixes.
LEASE_SECONDS = 120.0
# How long a process waits until it sees the file that the chief has written: file systems such as NFS
# cache the content of folders.
_SHARED_SECONDS = 30.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """Rejects a second run in a workdir.

        with RunLock("runs/mine") as lock:
            lock.acquire()                  # UsageError, naming the other run
            train()

    The operating system holds the lock on `run.lock` (by `filelock`), and releases it when the process
    ends, however it ends. The file also names its holder: pid, host and start time.

    Args:
        folder: the workdir; `acquire` creates it if it does not exist.
    """

    def __init__(self, folder: str | pathlib.Path):
        self._folder = pathlib.Path(folder)
        self._path = self._folder / NAME
        # A forked child closes its copy of the descriptor, so it cannot keep the lock of a killed run.
        self._lock = filelock.FileLock(self._path, on_acquired=_write_holder)
        self._created: list[pathlib.Path] = []

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Locks the folder.

        Raises:
            UsageError: another run holds the lock.
            Failure: the file cannot be written.
        """
        self._created += [p for p in (self._folder, *self._folder.parents) if not p.exists()]
        holder = self._read_holder()
        try:
            with report_write_errors(str(self._path), self._folder / "checkpoints"):
                make_folder(self._folder)
                self._acquire(holder)
        except BaseException:  # such as an interrupt just after the lock was taken
            self.release()
            raise

    def follow(self, moved_to: pathlib.Path) -> None:
        """Releases the lock of a folder that was moved, and locks a new folder at the old path.

        Args:
            moved_to: where the folder is now, with the lock's file in it.
        """
        self._release(moved_to / NAME)
        self.acquire()

    def all_check_shared(self, processes: "ProcessGroup") -> None:
        """Checks that every process of the run sees the file of the chief's lock; collective.

        Without a shared folder, a restart would find the checkpoints in one process only.

        Args:
            processes: the processes of the run, of which the chief has locked the folder.

        Raises:
            UsageError: a process sees another folder; raised in every process.
        """
        # Names the start of the chief, so a file that is left of an earlier one is not its file.
        token = processes.broadcast_from_chief(_identify(self._read()))

        def find_blind() -> list[str]:
            contents = {"": self._read(), **processes.read_on_servers(str(self._path))}
            return [name for name, content in contents.items() if _identify(content) != token]

        deadline = time.monotonic() + _SHARED_SECONDS
        while (blind := find_blind()) and time.monotonic() < deadline:
            for folder in (*reversed(self._folder.parents), self._folder):
                with contextlib.suppress(OSError):  # opening a folder renews the cache of NFS
                    os.close(os.open(folder, os.O_RDONLY))
            time.sleep(0.2)
        if processes.any_process(bool(blind)):
            if not any(blind):
                seen = processes.gather([float(not blind)])
                members = zip(processes.members, seen, strict=True)
                blind = [f"{name} on {host}" for (name, host), (sees,) in members if not sees]
            raise UsageError(
                f"{self._folder} is not the same folder in every process, since {list_some(blind)} "
                "cannot read what the chief has written there: name a --workdir on a disk that all of "
                "them share."
            )

    def release(self) -> None:
        """Unlocks the folder, and removes it if it was created for the lock and is empty."""
        self._release(self._path)
        for folder in self._created:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        self._created = []

    def _acquire(self, holder: dict[str, Any] | None) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            self._wait_for_lease()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            errors.print_line(
                f"{self._folder} is on a file system without locks ({error.strerror}): make sure that "
                "only one run uses it."
            )
            with self._path.open("wb", buffering=0) as file:
                _write_holder(file.fileno())
        else:
            if holder:  # a run that ends, even by an error, removes its file
                errors.print_line(f"{self._folder} was left by a killed run, {describe(holder)}.")

    def _wait_for_lease(self) -> None:
        """Waits for the lock if its holder is on another host, which may have died."""
        holder = self._read_holder()
        if holder and holder["host"] != socket.gethostname():
            errors.print_line(
                f"{self._folder} is locked by {describe(holder)}: waiting up to "
                f"{LEASE_SECONDS:.0f} s in case that host died."
            )
            with contextlib.suppress(filelock.Timeout):
                self._lock.acquire(timeout=LEASE_SECONDS, poll_interval=1.0)
                return
        raise in_use(self._folder, describe(holder) if holder else "which is just starting")

    def _read_holder(self) -> dict[str, Any] | None:
        """Returns the holder that the file names; None without a file or valid content."""
        with contextlib.suppress(OSError, ValueError):
            return json_files.parse(self._path.read_bytes(), pid=int, host=str, since=str)
        return None

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO):
                raise  # says nothing about what other processes have written
            return b""

    def _release(self, path: pathlib.Path) -> None:
        if self._lock.is_locked:
            # Removed before it is unlocked: whoever waits for the lock of this file then sees that
            # the file is gone, and opens the path again.
            with contextlib.suppress(OSError):
                path.unlink()
            self._lock.release()


def _write_holder(descriptor: int) -> None:
    """Writes who holds the lock into its file."""
    line = json.dumps(this_process()).encode() + b"\n"
    os.ftruncate(descriptor, 0)  # filelock 4.2 and later keep what a killed run left
    if os.write(descriptor, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _identify(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


def this_process() -> dict[str, Any]:
    """Identifies this process as the holder of a lock."""
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def describe(holder: Mapping[str, Any]) -> str:
    """Describes the holder of a lock, for messages."""
    return f"pid {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def in_use(workdir: object, who: str) -> UsageError:
    """Returns the error of a workdir that another run uses."""
    return UsageError(
        f"{workdir} is in use by another run, {who}: stop it, wait for its end, or name another "
        "--workdir."
    )
