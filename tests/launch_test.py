"""The launcher's command line, and processes that it starts, with scripts in place of the program.

tests/end_to_end/processes_test.py runs the program.
"""

import os
import signal
import sys
import time

import pytest

from ctl import launch, main
from ctl.hardware import rendezvous
from ctl.launch import Launcher


@pytest.fixture
def launchers(monkeypatch):
    """Records the launchers that are made, in place of running them."""
    created = []
    monkeypatch.setattr(Launcher, "run", lambda self: created.append(self) or 7)
    return created


def test_arguments_after_the_dashes_go_to_the_program(launchers):
    flags = ["--workers=3", "--ps=2", "--max-restarts=1"]
    assert launch.main([*flags, "--", "--config=a.py", "--mode=train"]) == 7
    assert main.run(["ctl", "launch", "--", "--config=a.py"]) == 7
    first, second = launchers
    command = [sys.executable, "-m", "ctl.main", "--config=a.py", "--mode=train"]
    assert first.command(None) == command and second.command(None) == command[:-1]
    assert (first.workers, first.ps, first.max_restarts) == (3, 2, 1)
    assert (second.workers, second.ps, second.max_restarts) == (1, 0, 0)


FORM = "write ctl launch --workers=2 -- CONFIG ARGUMENTS; see --help."


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--workers=2 --", f"ctl launch: the following arguments are required: ARGUMENT: {FORM}"),
        ("a.py --config.seed=5", f"ctl launch: unrecognized arguments: --config.seed=5: {FORM}"),
        ("--workers=0 -- --config=a.py", "--workers is 0, but must be at least 1."),
        ("--ps=-1 -- --config=a.py", "--ps is -1, but must be at least 0."),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(launchers, capfd, arguments, line):
    assert main.run(["ctl", "launch", *arguments.split()]) == 2
    assert capfd.readouterr() == ("", f"ctl: {line}\n")
    assert not launchers


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Finds no GPU, so that the driver is not queried."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_workers_are_at_most_the_gpus(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b")
    assert main.run(["ctl", "launch", "--workers=3", "--", "--config=a.py"]) == 2
    error = capfd.readouterr().err
    assert "--workers is 3, but this machine has 2 GPUs: start at most 2 workers, or" in error


def test_gpus_are_divided_among_the_workers(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    # With the second variable, a port that another program has taken is no mistake of the user.
    names = f"'CUDA_VISIBLE_DEVICES', {rendezvous.PORTS_BY_LAUNCHER!r}"
    text = f"print(task['type'], task['index'], *map(os.environ.get, [{names}]))"
    assert Launcher(lambda task: script(text), workers=2).run() == 0
    out = sorted(capfd.readouterr().out.splitlines())
    assert out == ["[worker 0] worker 0 a,b 1", "[worker 1] worker 1 c 1"]


def script(text):
    """A command that runs Python code, to which `task` is the type and index of its task."""
    header = (
        "import json, os, pathlib, signal, sys, time; "
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
    )
    return [sys.executable, "-c", header + text]


def test_first_failure_is_reported_and_stops_the_others(capfd):
    text = "sys.exit(3) if task['index'] else signal.pause()"  # which ends by a signal only
    assert Launcher(lambda task: script(text), workers=2).run() == 3
    error = capfd.readouterr().err
    assert error.startswith("ctl.launch: worker 1 failed first (exit code 3); see its last lines")
    assert error.count("\n") == 1


def test_code_above_those_of_the_signals_is_reported(capfd):
    assert Launcher(lambda task: script("sys.exit(-1)"), workers=1).run() == 255
    assert "worker 0 failed first (exit code 255)" in capfd.readouterr().err


def test_code_of_a_signal_is_as_in_shells_and_temporary_files_are_deleted(capfd):
    text = "import tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), 9)"
    launcher = Launcher(lambda task: script(text), workers=1, max_restarts=1)
    assert launcher.run() == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert "worker 0 failed first (killed by SIGKILL)" in err
    folders = [line.removeprefix("[worker 0] ") for line in out.splitlines()]
    assert len(folders) == 2
    assert not any(os.path.exists(os.path.dirname(folder)) for folder in folders)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        # A process that is killed takes others with it, whose error it may not recognize.
        (["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"], 128 + signal.SIGKILL),
        # Those that report a lost worker, or that TensorFlow aborts, are not the cause.
        (["sys.exit(75)", "os.abort()", "sys.exit(1)"], 1),
        (["sys.exit(75)", "os.abort()"], 128 + signal.SIGABRT),
    ],
)
def test_cause_is_selected_by_its_kind_if_several_processes_have_ended(endings, cause, tmp_path):
    text = f"exec({endings!r}[task['index']])"
    launcher = Launcher(lambda task: script(text), workers=len(endings))
    launcher._start(range(len(endings)), str(tmp_path))
    for process in launcher._processes:
        process._popen.wait()
    assert launcher._find_failure().exit_code == cause


def test_cause_may_exit_after_the_processes_that_noticed_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_CAUSE_TIMEOUT", 300.0)  # worker 1 may start late
    # Python's teardown of the process that failed takes a moment; the others exit at once.
    text = (
        "ends = pathlib.Path(sys.argv[1])\n"
        f"if task['index'] == 0: ends.touch(); os._exit({launch.STOPPED})\n"
        "while not ends.exists(): time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    command = [*script(text), str(tmp_path / "ends")]
    assert Launcher(lambda task: command, workers=2).run() == 5
    assert "worker 1 failed first (exit code 5)" in capfd.readouterr().err


def test_consequence_without_another_failure_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(launch, "_CAUSE_TIMEOUT", 0.3)
    text = "os.abort() if task['index'] == 0 else time.sleep(60)"
    code = Launcher(lambda task: script(text), workers=2).run()
    assert code == 128 + signal.SIGABRT
    assert "worker 0 failed first (killed by SIGABRT)" in capfd.readouterr().err


def test_failure_restarts_all_processes_with_a_new_command(tmp_path, capfd):
    commands = []

    def command(task):
        commands.append(task.name)
        return script("sys.exit(1)" if len(commands) == 2 else "pass")

    assert Launcher(command, workers=2, max_restarts=2).run() == 0
    assert commands == ["worker 0", "worker 1"] * 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last == "ctl.launch: All processes have stopped. Restarting them; 1 more restart."


def test_user_error_is_not_restarted(capfd):
    text = f"sys.exit({launch.USER_ERROR})"
    assert Launcher(lambda task: script(text), workers=1, max_restarts=5).run() == 2
    assert "Restarting" not in capfd.readouterr().err


# The chief of parameter servers waits until the file exists; workers and servers never end.
CHIEF = """
if task['type'] == 'chief':
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    sys.exit(0)
if task == {'type': 'worker', 'index': 1}:
    sys.exit(9)
time.sleep(60)
"""


def test_chief_continues_without_a_lost_worker(tmp_path, capfd, monkeypatch):
    command = [*script(CHIEF), str(tmp_path / "done")]
    launcher = Launcher(lambda task: command, workers=2, ps=1)

    def end_chief(signals, running):  # in a poll after the worker has ended
        if any(process.exit_code for process in launcher._processes):
            (tmp_path / "done").touch()

    monkeypatch.setattr(launch, "pass_on", end_chief)
    assert launcher.run() == 0
    assert capfd.readouterr().err == ""


def test_run_fails_when_the_last_worker_of_parameter_servers_is_lost(capfd):
    text = "sys.exit(9) if task['type'] == 'worker' else time.sleep(60)"
    launcher = Launcher(lambda task: script(text), workers=1, ps=1)
    assert launcher.run() == 9
    assert "worker 0 failed first (exit code 9)" in capfd.readouterr().err


def test_signal_is_forwarded_and_its_exit_code_returned(tmp_path):
    text = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    launcher = Launcher(lambda task: script(text), workers=1, max_restarts=5)
    assert launcher.run() == 75


def test_signal_while_processes_are_started_reaches_all_of_them():
    def stop_launcher(task):
        if task.index == 0:  # before the first process exists
            os.kill(os.getpid(), signal.SIGTERM)
        return script("time.sleep(600)")

    start = time.monotonic()
    assert Launcher(stop_launcher, workers=2).run() == 128 + signal.SIGTERM
    assert time.monotonic() - start < 300


def test_signal_after_a_failure_does_not_end_a_process_that_saves(tmp_path, capfd):
    # Worker 0 saves after worker 1 has failed. A second signal would end it.
    waits = "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit(3)"
    saves = """
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
    ready = str(tmp_path / "ready")
    assert Launcher(lambda t: [*script(waits if t.index else saves), ready], workers=2).run() == 3
    assert "[worker 0] saved" in capfd.readouterr().out


def test_second_signal_kills_the_processes():
    text = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"
    )
    assert Launcher(lambda task: script(text), workers=1).run() == 128 + signal.SIGKILL
