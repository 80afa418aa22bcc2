"""One run at a time in a workdir. Loads no TensorFlow."""

from collections.abc import Callable
import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import tempfile
import threading
import time
from typing import Any
import uuid

from ctl import errors
from ctl.errors import Failure, UsageError
from ctl.loop import write_errors

NAME = "run.lock"
STALE = 60.0  # seconds without a heartbeat, after which another host's run is taken for gone
BEAT = 10.0  # seconds between two heartbeats
LOOK = 1.0  # seconds between two looks at another host's heartbeat
PATIENCE = 180.0  # seconds that a dead host's lock may be kept by the server of a shared disk
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class RunLock:
    """Keeps a second run out of a workdir, by a file in it that says who is there.

        with RunLock("runs/mine") as lock:
            lock.acquire()                  # or a UsageError that names the other run
            while training:
                lock.check()

    Between processes of one machine `flock` decides, which ends with its process, however that ends.
    For other hosts on a shared disk, where `flock` may not reach, a thread touches the file: its
    modification time is the heartbeat. A loop's end would be no heartbeat for loops that are longer
    than a minute.
    """

    def __init__(
        self, folder: str | pathlib.Path, *, write: Callable[[str], None] = errors.print_line
    ):
        """Names the workdir; nothing is locked before `acquire`.

        Args:
            folder: the workdir, which is made if it is not there.
            write: where the line goes that says from whom the folder was taken over.
        """
        self._folder = pathlib.Path(folder)
        self._path = self._folder / NAME
        self._write = write
        self._mine = b""
        self._descriptor: int | None = None
        self._seen: tuple[dict[str, Any], float] | None = None
        self._waiting_since = 0.0
        self._made: list[pathlib.Path] = []
        self._beaten = 0.0
        self._taken_by: str | None = None
        self._released = threading.Event()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Locks the folder.

        Raises:
            UsageError: another run is in it.
            Failure: the file cannot be written.
        """
        self._seen, self._waiting_since = None, time.monotonic()
        with write_errors.report_write_errors(str(self._path), self._folder / "checkpoints"):
            while not self._try():
                time.sleep(LOOK)
        self._beaten, self._taken_by, self._released = time.monotonic(), None, threading.Event()
        threading.Thread(
            target=self._beat_until, args=(self._released,), name="ctl-run-lock", daemon=True
        ).start()

    def follow(self, moved_to: pathlib.Path) -> None:
        """Lets go of a folder that was moved, and locks a new one in its place.

        Args:
            moved_to: where the folder is now, with the lock's file in it.
        """
        self._let_go(moved_to / NAME)
        self.acquire()

    def check(self) -> None:
        """Makes sure that the folder is still this run's.

        Raises:
            Failure: this process stood still for so long that another took it for gone.
        """
        if self._descriptor is not None and time.monotonic() - self._beaten > 1.0:
            self._beat()
        if self._taken_by:
            raise Failure(
                f"{self._folder} was taken over by {self._taken_by} after this run had stood still: "
                "this one stops here, and leaves the folder to the other."
            )

    def release(self) -> None:
        """Unlocks the folder; one that was made for the lock and got nothing else goes, too."""
        self._let_go(self._path)
        self._remove_made()

    def _try(self) -> bool:
        """Locks the folder; False where it is not known yet whether another host's run is gone."""
        descriptor, locked = self._open()
        try:
            taken = self._take(descriptor, locked)
        except BaseException:
            _close(descriptor)
            self._remove_made()
            raise
        if taken:
            self._descriptor = descriptor
        else:
            _close(descriptor)
        return taken

    def _open(self) -> tuple[int, bool | None]:
        """The descriptor of the file that is at the path, and what `flock` said."""
        while True:
            self._make_folder()
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # the folder was moved aside in between
                continue
            _held.add(descriptor)
            locked = _flock(descriptor)
            with contextlib.suppress(FileNotFoundError):  # its holder may have removed it since
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor, locked
            _close(descriptor)

    def _take(self, descriptor: int, locked: bool | None) -> bool:
        """Puts this run's name in the file, unless another's in it is to be believed."""
        text = os.pread(descriptor, 4096, 0)
        holder = _holder(text)
        if locked is False and (holder is None or _is_of_this_boot(holder)):
            raise UsageError(self._refusal(holder))
        if holder:
            ended = locked and _is_here(holder)
            if not ended and self._may_be_alive(descriptor, holder, locked):
                return False
            self._write(f"{self._folder} is taken over from a run that has gone: {_name(holder)}.")
        self._mine = json.dumps(_me()).encode() + b"\n"
        try:
            os.ftruncate(descriptor, 0)
            if os.pwrite(descriptor, self._mine, 0) < len(self._mine):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _may_be_alive(self, descriptor: int, holder: dict[str, Any], locked: bool | None) -> bool:
        """Whether a holder that `flock` tells nothing of may yet be heard; refuses if it was."""
        beat = os.fstat(descriptor).st_mtime
        silent = self._now() - beat  # both are the file system's own: hosts' clocks differ
        if silent >= STALE and locked is not False:
            return False
        if self._seen is None:
            self._write(
                f"{self._folder} has the lock of {_name(holder)}, last heard of {silent:.0f} s ago: "
                "waiting to see whether it is still there."
            )
            self._seen = (holder, beat)
        if self._seen != (holder, beat) or time.monotonic() - self._waiting_since > PATIENCE:
            raise UsageError(self._refusal(holder))
        return True

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        who = _name(holder) if holder else "one that is just starting"
        return (
            f"{self._folder} is in use by another run, {who}: stop it, wait for its end, or name "
            "another --workdir."
        )

    def _now(self) -> float:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def _beat_until(self, released: threading.Event) -> None:
        while not released.wait(BEAT):
            self._beat()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        with contextlib.suppress(OSError):  # a shared disk may be away for a while
            text = self._path.read_bytes()  # opened anew, so that NFS looks at what is there
            if text == self._mine:
                os.utime(self._path)
            elif _holder(text):
                self._taken_by = _name(_holder(text) or {})

    def _let_go(self, path: pathlib.Path) -> None:
        self._released.set()
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            if path.read_bytes() == self._mine:
                path.unlink()  # before `flock` ends: who waits for it looks at the path again
        _close(self._descriptor)
        self._descriptor = None

    def _make_folder(self) -> None:
        missing = [p for p in (self._folder, *self._folder.parents) if not p.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._made = [*self._made, *(p for p in missing if p not in self._made)]

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
        self._made = []


_held: set[int] = set()


def _close_in_child() -> None:
    """A forked process must not keep the lock: it may outlive the run."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _close(descriptor: int) -> None:
    if descriptor in _held:  # not so in a forked process
        _held.discard(descriptor)
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether the lock was got; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _boot(),
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "run": uuid.uuid4().hex,
    }


def _boot() -> str:
    """Names the machine from its start to its end, whatever its containers are called."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether `flock` decides about a holder: it is, or was, on this machine."""
    return holder["host"] == socket.gethostname() or _is_of_this_boot(holder)


def _is_of_this_boot(holder: dict[str, Any]) -> bool:
    """Whether a holder that has the lock runs on this machine, and not on one that has died."""
    boot = _boot()
    if not boot:
        return bool(holder["host"] == socket.gethostname())
    return bool(holder.get("boot") == boot)


def _holder(text: bytes) -> dict[str, Any] | None:
    """What a lock's file says; None where it says nothing, as of a run killed while it began."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if not isinstance(content, dict) or not {"pid", "host", "since"} <= content.keys():
        return None
    return content


def _name(holder: dict[str, Any]) -> str:
    return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
