"""ctl.loop.bucket.ownership: one process at a time writes the folder of a run."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from ctl.errors import Failure, UsageError
from ctl.loop.bucket import ownership
from ctl.loop.bucket.ownership import Ownership


@pytest.fixture(autouse=True)
def fast(quick, monkeypatch):
    """A lease is short; with the fixture `clock`, it never ends."""
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 0.3)


@pytest.fixture
def owner(store):
    owner = Ownership(store)
    yield owner
    owner.end(released=False)


def leave(store, number, **fields):
    """Writes what a process leaves that was killed: on another machine, by default."""
    holder = {"pid": 1, "host": "alpha", "machine": "alpha", "since": "2026", **fields}
    store.write(f"owner/{number:08d}", json.dumps(holder).encode())


def test_released_run_is_taken_over_without_waiting(store, owner, clock):
    first = Ownership(store)
    first.acquire()
    first.end(released=True)
    assert owner.acquire() == 1 and owner.number == 2


def test_run_of_a_dead_process_of_this_machine_is_taken_over_without_waiting(store, owner, clock):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    leave(store, 7, pid=child.pid, machine=ownership._machine())
    assert owner.acquire() == 7
    assert list(store.list("owner")) == ["00000008"]


def test_owner_notices_that_it_was_taken_over(store):
    lost = threading.Event()
    owner = Ownership(store, lost.set)
    owner.acquire()
    leave(store, 2, host=socket.gethostname())
    assert lost.wait(60)
    with pytest.raises(Failure, match="was taken over by another run"):
        owner.check()
    owner.end(released=True)
    assert json.loads(store.read("owner/00000002"))["pid"] == 1  # the other's object is as it was


def test_two_processes_that_start_at_once_do_not_both_become_owner(store, owner):
    leave(store, 1)
    store.list = lambda folder="": {}  # late
    with pytest.raises(UsageError, match="has just been taken by another run"):
        owner.acquire()


def test_store_without_preconditions_is_reported(store, owner, monkeypatch, capsys):
    monkeypatch.setattr(store, "create", lambda name, content: not store.write(name, content))
    owner.acquire()
    assert "this store ignores preconditions" in capsys.readouterr().out


def test_late_listing_is_not_taken_for_the_end_of_the_ownership(store):
    leave(store, 3, released=True)
    owner = Ownership(store)
    owner.acquire()
    store.list = lambda folder="": {"00000003": 1}
    owner.check()
    leave(store, 5)
    with pytest.raises(Failure, match="was taken over"):
        owner.check()
    owner.end(released=False)


LOST = b'{"pid": 1, "host": "beta", "since": "2026"}'
UNKNOWN = "a process that its object does not name"


@pytest.mark.parametrize(
    ("content", "who"),
    [(LOST, "pid 1 on beta since 2026"), (b"\xff", UNKNOWN), (b'{"pid": "x"}', UNKNOWN)],
)
def test_run_of_a_lost_machine_is_taken_over_after_the_lease(store, owner, content, who, capsys):
    store.write("owner/00000003", content)
    assert owner.acquire() == 3
    assert f"owned by {who}: waiting up to 0 s" in capsys.readouterr().out


def test_damaged_reads_of_a_live_owner_are_no_end_and_no_sign_of_life(
    store, owner, monkeypatch, clock
):
    lives = [json.dumps({"pid": 1, "host": "beta", "beat": beat}).encode() for beat in (1, 2)]
    reads = iter([b"", lives[0], None, b"{", lives[0], lives[1]])

    def read_slowly(name):
        clock.now += 0.26 * ownership.LEASE_SECONDS  # the last read ends after the lease
        return next(reads)

    leave(store, 3)
    monkeypatch.setattr(store, "read", read_slowly)
    with pytest.raises(UsageError, match="in use by another run, pid 1 on beta"):
        owner.acquire()
    assert next(reads, "all were read") == "all were read"
