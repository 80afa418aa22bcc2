"""Two runs in one workdir are refused, and one that is gone is in nobody's way."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import signal
import threading
import time

import pytest

from ctl import main
from ctl.errors import Failure, UsageError
from ctl.loop import lock
from ctl.loop.lock import RunLock
from tests import child, experiments

HOLD = """
import os, sys, time
from ctl.loop.lock import RunLock

lock = RunLock(sys.argv[1])
lock.acquire()
if "fork" in sys.argv and not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lines():
    return []


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "LOOK", 0.01)
    monkeypatch.setattr(lock, "PATIENCE", 0.5)


@contextlib.contextmanager
def beating(folder):
    """Another host's heartbeat, by its own clock."""
    ended = threading.Event()
    path = folder / lock.NAME

    def beat():
        while not ended.wait(0.05):
            then = path.stat().st_mtime + 0.05
            os.utime(path, (then, then))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def make(tmp_path, lines):
    """Makes the lock of the folder `run`, as another process would; released at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(RunLock(tmp_path / "run", write=lines.append))


@contextlib.contextmanager
def holder(folder, *arguments):
    """Another process that holds the lock of a folder until it is killed."""
    with child.start(["-c", HOLD, str(folder), *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


def locked(process):
    assert process.stdout.readline() == "locked\n"


def elsewhere(folder, *, age, **changes):
    """Leaves the lock of a run on another host, last touched so many seconds ago."""
    folder.mkdir(exist_ok=True)
    me = {"pid": 7, "host": "elsewhere", "boot": "other", "since": "2026-01-02 03:04:05+00:00"}
    (folder / lock.NAME).write_text(json.dumps(me | changes))
    then = time.time() - age
    os.utime(folder / lock.NAME, (then, then))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_second_run_is_refused_in_one_line_that_says_who_is_there(make, tmp_path):
    with holder(tmp_path / "run") as process:
        locked(process)
        since = json.loads((tmp_path / "run" / lock.NAME).read_text())["since"]
        with pytest.raises(UsageError) as refused:
            make().acquire()
    assert str(refused.value) == (
        f"{tmp_path / 'run'} is in use by another run, pid {process.pid} on {os.uname().nodename} "
        f"since {since}: stop it, wait for its end, or name another --workdir."
    )


def test_a_refused_run_leaves_the_lock_as_it_is(make, tmp_path):
    make().acquire()
    before = (tmp_path / "run" / lock.NAME).read_bytes()
    with pytest.raises(UsageError):
        make().acquire()
    assert (tmp_path / "run" / lock.NAME).read_bytes() == before
    with pytest.raises(UsageError):
        make().acquire()


def test_killed_run_is_taken_over_at_once_with_a_line(make, tmp_path, lines):
    with holder(tmp_path / "run") as process:
        locked(process)
        process.kill()
        process.wait()
        start = time.monotonic()
        make().acquire()
    assert time.monotonic() - start < 5
    assert len(lines) == 1
    assert lines[0].startswith(
        f"{tmp_path / 'run'} is taken over from a run that has gone: pid {process.pid} on "
    )


def test_forked_process_that_outlives_a_killed_run_does_not_keep_its_lock(make, tmp_path):
    with holder(tmp_path / "run", "fork") as process:
        first, second = process.stdout.readline(), process.stdout.readline()
        orphan = int(first if second == "locked\n" else second)
        process.kill()
        process.wait()
        try:
            make().acquire()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_pid_that_another_program_has_now_is_no_run(make, tmp_path, lines):
    elsewhere(tmp_path / "run", age=0, pid=os.getpid(), host=os.uname().nodename)
    make().acquire()
    assert f"pid {os.getpid()}" in lines[0]


def test_run_from_before_a_reboot_is_gone(make, tmp_path, lines):
    elsewhere(tmp_path / "run", age=1, host=os.uname().nodename, boot="the one before")
    make().acquire()
    assert len(lines) == 1


def test_container_that_was_replaced_on_the_same_machine_is_gone(make, tmp_path, lines):
    if not lock._boot():
        pytest.skip("this system does not name its boots")
    elsewhere(tmp_path / "run", age=1, host="pod-1", boot=lock._boot())
    make().acquire()
    assert len(lines) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_lock_that_says_nothing_is_taken(make, tmp_path, lines, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.NAME).write_text(text)
    make().acquire()
    assert lines == []
    assert json.loads((tmp_path / "run" / lock.NAME).read_text())["pid"] == os.getpid()


def test_another_hosts_run_is_refused_as_soon_as_it_is_heard(make, tmp_path, monkeypatch, lines):
    monkeypatch.setattr(lock, "PATIENCE", 60)
    elsewhere(tmp_path / "run", age=20)
    start = time.monotonic()
    with beating(tmp_path / "run"), pytest.raises(UsageError) as refused:
        make().acquire()
    assert time.monotonic() - start < 10
    assert "in use by another run, pid 7 on elsewhere since 2026-01-02" in str(refused.value)
    assert lines == [
        f"{tmp_path / 'run'} has the lock of pid 7 on elsewhere since 2026-01-02 03:04:05+00:00, "
        "last heard of 20 s ago: waiting to see whether it is still there."
    ]


def test_another_hosts_run_is_waited_for_until_it_must_be_gone(make, tmp_path, monkeypatch, lines):
    monkeypatch.setattr(lock, "PATIENCE", 60)
    elsewhere(tmp_path / "run", age=59.5)
    start = time.monotonic()
    make().acquire()
    assert 0.3 < time.monotonic() - start < 10
    assert [line.count("taken over") for line in lines] == [0, 1]


@pytest.mark.parametrize("patience", [0.5, 60])
def test_flock_of_a_host_that_died_is_waited_for(make, tmp_path, monkeypatch, lines, patience):
    """As a server of NFS keeps it until the client's lease is over."""
    monkeypatch.setattr(lock, "PATIENCE", patience)
    with holder(tmp_path / "run") as process:
        locked(process)
        elsewhere(tmp_path / "run", age=61, host=os.uname().nodename, boot="the one before")
        if patience > 1:
            threading.Timer(0.5, process.kill).start()
        with contextlib.nullcontext() if patience > 1 else pytest.raises(UsageError):
            make().acquire()
    assert [line.count("taken over") for line in lines] == [0, 1][: len(lines)]
    assert len(lines) == (2 if patience > 1 else 1)


def test_another_hosts_run_without_a_heartbeat_is_taken_over(make, tmp_path, lines):
    elsewhere(tmp_path / "run", age=61)
    make().acquire()
    assert len(lines) == 1
    assert "taken over" in lines[0] and "pid 7 on elsewhere" in lines[0]


@pytest.mark.parametrize("shift", [-3600.0, 3600.0])
@pytest.mark.parametrize(("age", "gone"), [(20, False), (61, True)])
def test_this_hosts_clock_does_not_matter(make, tmp_path, monkeypatch, shift, age, gone):
    elsewhere(tmp_path / "run", age=age)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + shift)
    with contextlib.nullcontext() if gone else pytest.raises(UsageError):
        make().acquire()


@pytest.mark.parametrize(("age", "gone"), [(20, False), (61, True)])
def test_heartbeat_decides_where_there_is_no_flock(make, tmp_path, monkeypatch, age, gone):
    def none(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    elsewhere(tmp_path / "run", age=age, host=os.uname().nodename)
    monkeypatch.setattr(fcntl, "flock", none)
    with contextlib.nullcontext() if gone else pytest.raises(UsageError):
        make().acquire()


def test_heartbeat_goes_on_by_itself(make, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    make().acquire()
    path = tmp_path / "run" / lock.NAME
    os.utime(path, (5, 5))
    end = time.monotonic() + 10
    while path.stat().st_mtime == 5 and time.monotonic() < end:
        time.sleep(0.01)
    assert abs(path.stat().st_mtime - time.time()) < 10


def test_heartbeat_ends_with_the_lock(make, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    held = make()
    held.acquire()
    content = (tmp_path / "run" / lock.NAME).read_bytes()
    held.release()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.NAME).write_bytes(content)
    os.utime(tmp_path / "run" / lock.NAME, (5, 5))
    time.sleep(0.2)
    assert (tmp_path / "run" / lock.NAME).stat().st_mtime == 5


def test_run_that_stood_still_and_was_taken_over_finds_it_out(make, tmp_path):
    held = make()
    held.acquire()
    held.check()
    elsewhere(tmp_path / "run", age=0)
    held._beaten -= 2
    with pytest.raises(Failure, match=r"taken over by pid 7 on elsewhere .*this one stops here"):
        held.check()
    held.release()
    assert json.loads((tmp_path / "run" / lock.NAME).read_text())["host"] == "elsewhere"


def test_lock_that_a_person_removed_ends_nothing(make, tmp_path):
    held = make()
    held.acquire()
    (tmp_path / "run" / lock.NAME).unlink()
    held._beaten -= 2
    held.check()


def test_released_folder_is_free_and_has_no_lock_in_it(make, tmp_path):
    first = make()
    first.acquire()
    (tmp_path / "run" / "config.json").touch()
    first.release()
    assert names(tmp_path / "run") == ["config.json"]
    make().acquire()


def test_folder_made_for_the_lock_goes_with_it(tmp_path):
    with RunLock(tmp_path / "a" / "b" / "run") as held:
        held.acquire()
        assert names(tmp_path / "a" / "b" / "run") == [lock.NAME]
    assert names(tmp_path) == []


def test_lock_of_a_moved_folder_is_taken_anew_and_the_old_one_is_left_clean(make, tmp_path):
    held = make()
    held.acquire()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "run").rename(tmp_path / "aside")
    held.follow(tmp_path / "aside")
    assert names(tmp_path / "aside") == ["config.json"]
    assert names(tmp_path / "run") == [lock.NAME]
    with pytest.raises(UsageError):
        make().acquire()


def test_who_waits_at_the_file_of_a_moved_folder_does_not_get_the_new_one(
    make, tmp_path, monkeypatch
):
    """Between its `open` and its `flock` the folder is moved and locked anew by its holder."""
    held = make()
    held.acquire()
    flock, late = fcntl.flock, []

    def move_first(descriptor, operation):
        if not late:
            late.append(True)
            (tmp_path / "run").rename(tmp_path / "aside")
            held.follow(tmp_path / "aside")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", move_first)
    with pytest.raises(UsageError, match="in use by another run"):
        make().acquire()


def test_of_many_that_start_at_once_one_runs(tmp_path):
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(holder(tmp_path / "run")) for _ in range(4)]
        said = []
        end = time.monotonic() + 60
        while time.monotonic() < end and sum(p.poll() is not None for p in processes) < 3:
            time.sleep(0.05)
        running = [p for p in processes if p.poll() is None]
        assert len(running) == 1
        locked(running[0])
        said = [p.stderr.read() for p in processes if p is not running[0]]
        assert all("UsageError" in text for text in said)


def test_lock_that_cannot_be_written_ends_the_run_in_one_line(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Failure, match=r"run\.lock could not be written: No space left on device"):
        make().acquire()
    assert not pathlib.Path(tmp_path / "run" / lock.NAME).exists()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the program on a tiny experiment; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def program(*arguments):
        code = main.run(["ctl", "--config=experiment.py", "--workdir=run", *arguments])
        return (code, *capsys.readouterr())

    return program


@pytest.mark.parametrize("flags", [(), ("--fresh",)])
def test_program_is_refused_where_another_trains_and_changes_nothing(run, tmp_path, flags):
    assert run("--config.train.steps=10")[0] == 0
    with holder(tmp_path / "run") as process:
        locked(process)
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        code, out, err = run(*flags)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert err.startswith(f"ctl: run is in use by another run, pid {process.pid} on ")
        assert {p: p.stat().st_mtime_ns for p in before} == before
        assert names(tmp_path) == ["experiment.py", "run"]


@pytest.mark.parametrize("flags", [(), ("--fresh",)])
def test_program_leaves_no_lock(run, tmp_path, flags):
    for _ in range(2):
        assert run(*flags)[0] == 0
    assert not list(tmp_path.rglob(lock.NAME))


def test_program_that_fails_leaves_no_lock(run, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("ctl.StandardTrainer.train", fail)
    with pytest.raises(RuntimeError):
        run()
    assert not list(tmp_path.rglob(lock.NAME))


def test_evaluating_explaining_and_a_held_lock_go_together(run, tmp_path):
    assert run()[0] == 0
    with holder(tmp_path / "run") as process:
        locked(process)
        for mode in ("eval", "continuous_eval", "explain"):
            assert run(f"--mode={mode}")[0] == 0


def test_run_that_was_taken_over_writes_no_more(run, tmp_path, monkeypatch):
    monkeypatch.setattr("ctl.modes.train.RunLock.check", lambda self: _taken(self))
    code, _, err = run()
    assert (code, err) == (1, "ctl: planted\n")
    assert not (tmp_path / "run" / "result.json").exists()


def _taken(held):
    raise Failure("planted")


def test_killed_program_resumes_at_once(tmp_path):
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    program = ["-m", "ctl.main", "--config=experiment.py", "--workdir=run", "--mode=train"]
    with child.start([*program, "--config.train.steps=1000000"], cwd=tmp_path) as process:
        end = time.monotonic() + 120
        while not (tmp_path / "run/checkpoints/ckpt-30.index").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / lock.NAME).exists()
    step = max(int(p.stem[5:]) for p in (tmp_path / "run/checkpoints").glob("ckpt-*.index"))
    done = child.run([*program, f"--config.train.steps={step + 10}"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"run is taken over from a run that has gone: pid {process.pid} on " in done.stdout
    assert "Resumed from" in done.stdout
