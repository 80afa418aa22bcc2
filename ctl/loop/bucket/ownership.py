"""Lets one process at a time write the folder of a run in an object store.

The objects owner/<number> are numbered from 1. Each is created with a precondition, so that only one
process can create it, and the highest number is the owner. The owner rewrites its object every few
seconds. Another process takes over, by the next number, when the owner has released its object, has
died on the same machine, or has not changed the object for a while.
"""

from collections.abc import Callable
import contextlib
import datetime
import json
import os
import pathlib
import socket
import threading
import time
from typing import Any

from ctl.errors import Failure, UsageError, print_line
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
        self._holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="ctl-owner")

    def acquire(self) -> int:
        """Becomes the owner; returns the number of the one before, 0 if there was none.

        Raises:
            UsageError: another process is the owner.
        """
        previous = self._store.retry(latest, self._store)
        if previous:
            self._wait_for_end(previous)
        number = previous + 1
        name, content = _name(number), self._content()
        if not self._store.retry(self._store.create, name, content):
            # A try that timed out may have created it.
            if self._store.retry(self._store.read, name) != content:
                raise UsageError(
                    f"{self._store.url} has just been taken by another run: name another --workdir."
                )
        elif self._store.create(name, content):
            print_line(
                f"{self._store.url}: this store ignores preconditions, so two runs that start at the "
                "same time would not notice each other. Make sure that only one run uses it."
            )
        self.number = number
        self._store.remove([_name(previous)] if previous else [])
        self._thread.start()
        return previous

    def check(self) -> None:
        """Raises Failure if another process has taken over."""
        if latest(self._store) != self.number:
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
        if self._thread.ident:
            self._thread.join()
        with contextlib.suppress(Exception):  # the next owner then waits
            if released and self.number and latest(self._store) == self.number:
                self._store.write(_name(self.number), self._content(released=True))

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(HEARTBEAT_SECONDS):
            count += 1
            try:
                self.check()
                self._store.write(_name(self.number), self._content(beat=count))
            except Failure:
                return
            except Exception:  # the thread that uploads reports that the store fails
                continue

    def _content(self, **fields: Any) -> bytes:
        return json.dumps({**self._holder, **fields}).encode()

    def _wait_for_end(self, number: int) -> None:
        """Waits until an owner has ended; raises UsageError if it lives."""
        first = self._store.retry(self._store.read, _name(number))
        holder = _parse(first)
        if _has_ended(holder):
            return
        who = f"pid {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
        print_line(
            f"{self._store.url} is owned by {who}: waiting up to {LEASE_SECONDS:.0f} s in case that "
            "process has died."
        )
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            content = self._store.retry(self._store.read, _name(number))
            if content != first and not _has_ended(_parse(content)):
                raise UsageError(
                    f"{self._store.url} is in use by another run, {who}: stop it, wait for its end, or "
                    "name another --workdir."
                )
            if content != first:
                return


def latest(store: Store) -> int:
    """Returns the number of the last owner; 0 if there was none."""
    names = [name.rpartition("/")[2] for name in store.list(FOLDER)]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}"


def _parse(content: bytes | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        holder = json.loads(content or b"")
        return holder if isinstance(holder, dict) else {}
    return {}


def _has_ended(holder: dict[str, Any]) -> bool:
    if holder.get("machine") == _machine() and not _is_alive(holder.get("pid", 0)):
        return True
    return bool(holder.get("released"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _machine() -> str:
    """Identifies the boot and the container in which a pid is valid; the host's name may be shared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has them
        parts += [pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        parts += [os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
