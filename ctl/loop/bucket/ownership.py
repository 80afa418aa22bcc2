"""Lets one process at a time write the folder of a run in an object store.

The objects owner/<number> are numbered from 1. Each is created with a precondition, so that only one
process can create it, and the highest number is the owner. The owner rewrites its object every few
seconds. Another process takes over, by the next number, when the owner has released its object, has
died on the same machine, or has not changed the object for a while.
"""

from collections.abc import Callable
import contextlib
import json
import os
import pathlib
import socket
import threading
import time
from typing import Any

from ctl.errors import Failure, UsageError, print_line
from ctl.loop import json_files, lock
from ctl.loop.bucket.store import Store

FOLDER = "owner"
HEARTBEAT_SECONDS = 10.0
# Longer than the retries of a client, which may delay a heartbeat.
LEASE_SECONDS = 60.0
_POLL_SECONDS = 2.0


class Ownership:
    """The right to write the folder of a run.

        owner = Ownership(store)
        previous = owner.acquire()              # UsageError, naming the other process
        owner.check()                           # Failure, once another process has taken over
        owner.end(released=True)

    Args:
        store: the folder.
        on_lost: called in a thread when another process has taken over.

    Attributes:
        number: the number of this owner; 0 before `acquire`.
    """

    def __init__(self, store: Store, on_lost: Callable[[], None] = lambda: None):
        self._store = store
        self._on_lost = on_lost
        self.number = 0
        self._holder = {**lock.this_process(), "machine": _machine()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="ctl-owner")

    def acquire(self) -> int:
        """Becomes the owner; returns the number of the one before, 0 if there was none.

        Raises:
            UsageError: another process is the owner.
        """
        store, url = self._store, self._store.url
        previous = store.retry(latest, store)
        if previous:
            self._wait_for_end(previous)
        name, content = _name(previous + 1), self._content()
        if not store.retry(store.create, name, content):
            if store.retry(store.read, name) != content:  # else a try that timed out has created it
                raise UsageError(
                    f"{url} has just been taken by another run: name another --workdir."
                )
        elif store.retry(store.create, name, content):
            print_line(
                f"{url}: this store ignores preconditions, so two runs that start at the same time "
                "would not notice each other. Make sure that only one run uses it."
            )
        self.number = previous + 1
        self._thread.start()
        store.retry(store.remove, [_name(previous)])
        return previous

    def check(self) -> None:
        """Raises Failure if another process has taken over."""
        store, seen = self._store, latest(self._store)
        # A listing may be late. The next owner creates its object, and then removes this one.
        if seen < self.number and store.read(_name(self.number)):
            seen = self.number + (store.read(_name(self.number + 1)) is not None)
        if seen != self.number:
            self._on_lost()
            raise Failure(
                f"{self._store.url} was taken over by another run, because this one could not reach it "
                f"for {LEASE_SECONDS:.0f} s: this run ends."
            )

    def end(self, *, released: bool) -> None:
        """Ends the heartbeat.

        Args:
            released: whether another process may take over immediately.
        """
        self._ended.set()
        if not released or not self.number:  # the thread may be waiting for a store that hangs
            return
        self._thread.join()
        with contextlib.suppress(Exception):  # the next owner then waits
            if latest(self._store) == self.number:
                self._store.write(_name(self.number), self._content(released=True))

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                self.check()
                self._store.write(_name(self.number), self._content(beat=time.time()))
            except Failure:
                return
            except Exception:  # the thread that uploads reports that the store fails
                continue

    def _content(self, **fields: Any) -> bytes:
        return json.dumps({**self._holder, **fields}).encode()

    def _wait_for_end(self, number: int) -> None:
        """Waits until an owner has ended; raises UsageError if it lives.

        An object that cannot be parsed shows nothing: the lease begins with the first that can.
        """
        url, first = self._store.url, self._read(number)
        who = lock.describe(first) if first else "a process that its object does not name"
        holder, deadline = first, time.monotonic() + LEASE_SECONDS
        if not _has_ended(first):
            print_line(
                f"{url} is owned by {who}: waiting up to {LEASE_SECONDS:.0f} s in case that "
                "process has died."
            )
        # A read may take longer than the lease: what it shows counts.
        while not _has_ended(holder) and (holder != first or time.monotonic() < deadline):
            if holder != first:
                raise lock.in_use(url, who)
            time.sleep(_POLL_SECONDS)
            holder = self._read(number) or holder
            if not first and holder:
                first, who = holder, lock.describe(holder)
                deadline = time.monotonic() + LEASE_SECONDS

    def _read(self, number: int) -> dict[str, Any]:
        """Returns the holder that an object names; {} if it names none."""
        with contextlib.suppress(ValueError):
            content = self._store.retry(self._store.read, _name(number))
            return json_files.parse(content or b"", pid=int, host=str)
        return {}


def latest(store: Store) -> int:
    """Returns the number of the last owner; 0 if there was none."""
    return max((int(name) for name in store.list(FOLDER) if name.isdecimal()), default=0)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}"


def _has_ended(holder: dict[str, Any]) -> bool:
    here = bool(_machine()) and holder.get("machine") == _machine()
    return bool(holder.get("released")) or (here and not os.path.exists(f"/proc/{holder['pid']}"))


def _machine() -> str:
    """Identifies the boot and the container in which a pid is valid; "" if it is not Linux."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
