"""A second run in a workdir is rejected; a killed run blocks nobody."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import time

import pytest

from ctl.errors import Failure, UsageError
from ctl.loop import lock
from ctl.loop.lock import RunLock
from tests.support import child

HOLD = """
import os, sys, time
from ctl.loop.lock import RunLock

lock = RunLock(sys.argv[1])
lock.acquire()
orphan = os.fork() if "fork" in sys.argv else None
if orphan == 0:
    time.sleep(600)
print("locked", orphan, flush=True)
time.sleep(600)
"""
ELSEWHERE = {"pid": 7, "host": "elsewhere", "since": "2026-01-02 03:04:05+00:00"}


@pytest.fixture
def lines(capsys):
    """Returns the lines that were printed since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


@pytest.fixture
def make(tmp_path):
    """Makes a lock of the folder `run`, as another process would; released at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(RunLock(tmp_path / "run"))


@contextlib.contextmanager
def start_holder(folder, *arguments):
    """Another process that holds the lock of a folder until it is killed."""
    with child.start(["-c", HOLD, str(folder), *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_locked(process):
    word, orphan = process.stdout.readline().split()
    assert word == "locked"
    return None if orphan == "None" else int(orphan)


def acquire_by(run_lock, seconds):
    """Acquires a lock that is released at some time before a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return run_lock.acquire()
        except UsageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("arguments", [(), ("fork",)])
def test_lock_of_a_killed_run_is_free_even_if_a_forked_child_outlives_it(
    make, tmp_path, lines, arguments
):
    with start_holder(tmp_path / "run", *arguments) as process:
        orphan = wait_until_locked(process)
        process.kill()
        process.wait()
        try:
            # The child closes its copy of the lock right after the fork, but need not run before this.
            acquire_by(make(), seconds=60)
        finally:
            if orphan:
                os.kill(orphan, signal.SIGKILL)
    assert f"{tmp_path / 'run'} was left by a killed run, pid {process.pid} on " in lines()[0]


# The pid belongs to another program now.
KILLED = json.dumps({**ELSEWHERE, "pid": 1, "host": socket.gethostname()})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 7}', "\0" * 5000, KILLED])
def test_file_without_a_lock_is_replaced_and_a_holder_in_it_is_named(make, tmp_path, lines, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.NAME).write_text(text)
    make().acquire()
    assert len(lines()) == (text == KILLED)
    assert json.loads((tmp_path / "run" / lock.NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("dies", [True, False])
def test_lock_of_another_host_is_waited_for(make, tmp_path, monkeypatch, lines, dies):
    """The server of a shared disk keeps the lock of a dead host until its lease ends."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 60.0 if dies else 0.1)
    with start_holder(tmp_path / "run") as process:
        wait_until_locked(process)
        (tmp_path / "run" / lock.NAME).write_text(json.dumps(ELSEWHERE))
        if dies:
            sleep = time.sleep
            monkeypatch.setattr("time.sleep", lambda s: process.kill() or sleep(min(s, 0.01)))
            make().acquire()
        else:
            with pytest.raises(UsageError, match="in use by another run, pid 7 on elsewhere"):
                make().acquire()
    (line,) = lines()
    assert "locked by pid 7 on elsewhere since 2026-01-02 03:04:05+00:00: waiting" in line


class Group:
    """The processes of a run, as a worker sees them whose chief holds a lock."""

    members = (("worker 0", "a"), ("worker 1", "b"))

    def __init__(self, chief, servers=()):
        self._chief, self._servers = chief, servers

    def broadcast_from_chief(self, value):
        return lock._identify(self._chief._read())

    def read_on_servers(self, path):
        return dict(self._servers)

    def any_process(self, value):
        return value

    def gather(self, values):
        return [[1.0], values]


def test_folder_that_is_not_shared_is_rejected_before_training(tmp_path, monkeypatch):
    with RunLock(tmp_path / "a") as chief, RunLock(tmp_path / "b") as worker:
        chief.acquire()
        chief.all_check_shared(Group(chief))
        RunLock(tmp_path / "a").all_check_shared(Group(chief))  # another process of the run
        monkeypatch.setattr(lock, "_SHARED_SECONDS", 0.0)
        (tmp_path / "b").mkdir()
        for content in ("", json.dumps(ELSEWHERE)):  # nothing, or what an earlier start has left
            (tmp_path / "b" / lock.NAME).write_text(content)
            with pytest.raises(UsageError, match=r"since worker 1 on b cannot read .*--workdir"):
                worker.all_check_shared(Group(chief))
        with pytest.raises(UsageError, match=r"since ps 0 on c cannot read"):
            chief.all_check_shared(Group(chief, {"ps 0 on c": b""}))


def test_file_of_the_chief_that_appears_late_is_waited_for(tmp_path, monkeypatch):
    with RunLock(tmp_path / "a") as chief:
        chief.acquire()
        (tmp_path / "b").mkdir()
        content = (tmp_path / "a" / lock.NAME).read_bytes()
        appear = (tmp_path / "b" / lock.NAME).write_bytes
        monkeypatch.setattr(time, "sleep", lambda seconds: appear(content))
        RunLock(tmp_path / "b").all_check_shared(Group(chief))


def test_file_system_without_locks_is_reported_and_used(make, tmp_path, monkeypatch, lines):
    def fail(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", fail)
    run_lock = make()
    run_lock.acquire()
    (line,) = lines()
    assert "is on a file system without locks" in line
    run_lock.all_check_shared(Group(run_lock))
    run_lock.release()


def test_folder_created_for_the_lock_is_removed_with_it(tmp_path):
    with RunLock(tmp_path / "a" / "b" / "run") as run_lock:
        run_lock.acquire()
        assert names(tmp_path / "a" / "b" / "run") == [lock.NAME]
    assert names(tmp_path) == []


def test_lock_of_a_moved_folder_is_acquired_again_and_the_old_folder_is_left_clean(make, tmp_path):
    run_lock = make()
    run_lock.acquire()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "run").rename(tmp_path / "aside")
    run_lock.follow(tmp_path / "aside")
    assert names(tmp_path / "aside") == ["config.json"]
    assert names(tmp_path / "run") == [lock.NAME]
    with pytest.raises(UsageError):
        make().acquire()


def test_run_that_opened_the_file_of_a_moved_folder_does_not_get_its_lock(
    make, tmp_path, monkeypatch
):
    """Between its `open` and its `flock` the holder moves the folder and locks a new one."""
    run_lock = make()
    run_lock.acquire()
    flock, moved = fcntl.flock, []

    def move_first(descriptor, operation):
        if not moved:
            moved.append(True)
            (tmp_path / "run").rename(tmp_path / "aside")
            run_lock.follow(tmp_path / "aside")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", move_first)
    with pytest.raises(UsageError, match="in use by another run"):
        make().acquire()


def test_lock_that_cannot_be_written_ends_the_run_in_one_line(make, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 3)  # a full disk takes the first bytes
    with pytest.raises(Failure, match=r"run\.lock .*No space left"):
        make().acquire()
    monkeypatch.undo()
    make().acquire()  # and leaves the lock free


def test_program_that_trains_is_rejected_while_another_trains_and_changes_nothing(
    program, tmp_path
):
    short = ("--workdir=run", "--config.train.steps=10")
    assert program(*short)[0] == 0
    assert not list(tmp_path.rglob(lock.NAME))
    with start_holder(tmp_path / "run") as process:
        wait_until_locked(process)
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        for flags in ((), ("--fresh",)):
            code, out, err = program("--workdir=run", *flags)
            assert (code, out) == (2, "") and err.count("\n") == 1
            since = json.loads((tmp_path / "run" / lock.NAME).read_text())["since"]
            assert err == (
                f"ctl: run is in use by another run, pid {process.pid} on {os.uname().nodename} since "
                f"{since}: stop it, wait for its end, or name another --workdir.\n"
            )
            assert {p: p.stat().st_mtime_ns for p in before} == before
            assert [n for n in names(tmp_path) if n != "__pycache__"] == ["experiment.py", "run"]
        assert program("--mode=eval", *short)[0] == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_interrupt_while_the_lock_is_taken_frees_it(make, monkeypatch, error):
    first = make()
    acquire = first._lock.acquire

    def acquire_and_fail(**options):
        acquire(**options)
        raise error

    monkeypatch.setattr(first._lock, "acquire", acquire_and_fail)
    with pytest.raises((KeyboardInterrupt, Failure)):
        first.acquire()
    make().acquire()  # by another run, while the first object exists
