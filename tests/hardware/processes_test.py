"""Starting and supervising processes, with small scripts in place of the program."""

import os
import signal
import sys
import time
import types
from unittest import mock

import pytest

from ctl.hardware import elastic, gpu, processes
from ctl.hardware.elastic import FailureLimit, WorkerPool
from ctl.hardware.processes import Launcher


@pytest.fixture(autouse=True)
def restore_handlers(monkeypatch):
    """Removes the launcher's signal handlers; finds no GPU, so that the driver is not queried."""
    monkeypatch.setattr(gpu, "list_uuids", lambda: [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def script(text):
    """A command that runs Python code, to which `task` is the type and index of its task."""
    header = (
        "import json, os, pathlib, signal, sys, time; "
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
    )
    return [sys.executable, "-c", header + text]


def test_every_process_gets_its_task_and_its_output_has_its_name(capfd):
    text = "print('I am', task['type'], task['index'])"
    assert Launcher(lambda task: script(text), workers=2).run() == 0
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == ["[worker 0] I am worker 0", "[worker 1] I am worker 1"]


def test_first_failure_is_reported_and_stops_the_others(capfd):
    text = "sys.exit(3) if task['index'] else time.sleep(600)"
    start = time.monotonic()
    assert Launcher(lambda task: script(text), workers=2).run() == 3
    assert time.monotonic() - start < 300
    assert capfd.readouterr().err == (
        "ctl.launch: worker 1 failed first (exit code 3); stopping the other processes. Its last "
        "lines are above.\n"
    )


def test_error_that_several_processes_report_is_printed_once(capfd):
    text = (
        "print('ctl: There is no config key x.', file=sys.stderr)\n"
        "print('ctl: Only here:', task['index'])\n"
        "print('not an error')\n"
    )
    assert Launcher(lambda task: script(text), workers=2).run() == 0
    lines = sorted(line.partition("] ")[2] for line in capfd.readouterr().out.splitlines())
    assert lines == [
        "ctl: Only here: 0", "ctl: Only here: 1", "ctl: There is no config key x.", "not an error",
        "not an error",
    ]  # fmt: skip


def test_process_that_printed_the_error_is_named(tmp_path, capfd, monkeypatch):
    # The launcher reads it from worker 1 first, and worker 0 is the only one that exits by itself.
    text = (
        "while task['index'] == 0 and not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.01)\n"
        "print('ctl: There is no config key x.', flush=True)\n"
        "sys.exit(2) if task['index'] == 0 else time.sleep(600)\n"
    )

    def print_and_go_on(*arguments, **options):
        print(*arguments, **options)
        (tmp_path / "printed").touch()

    monkeypatch.setattr(processes, "print", print_and_go_on, raising=False)
    command = [*script(text), str(tmp_path / "printed")]
    assert Launcher(lambda task: command, workers=2).run() == 2
    out, err = capfd.readouterr()
    assert out == "[worker 1] ctl: There is no config key x.\n"
    assert err.startswith("ctl.launch: worker 1 failed first (exit code 2);")


def test_error_is_printed_again_after_a_restart(capfd):
    text = "print('ctl: failed.', flush=True); sys.exit(1)"
    assert Launcher(lambda task: script(text), workers=1, max_restarts=1).run() == 1
    assert capfd.readouterr().out == "[worker 0] ctl: failed.\n" * 2


def test_code_of_a_signal_is_as_in_shells(capfd):
    text = "os.kill(os.getpid(), signal.SIGKILL)"
    assert Launcher(lambda task: script(text), workers=1).run() == 128 + signal.SIGKILL
    assert "worker 0 failed first (killed by SIGKILL)" in capfd.readouterr().err


def test_code_above_those_of_the_signals_is_reported(capfd):
    assert Launcher(lambda task: script("sys.exit(-1)"), workers=1).run() == 255
    assert "worker 0 failed first (exit code 255)" in capfd.readouterr().err


def test_temporary_files_of_killed_processes_are_deleted(capfd):
    text = (
        "import tempfile\n"
        "print(tempfile.mkdtemp(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    Launcher(lambda task: script(text), workers=1, max_restarts=1).run()
    folders = [line.removeprefix("[worker 0] ") for line in capfd.readouterr().out.splitlines()]
    assert len(folders) == 2
    assert not any(os.path.exists(os.path.dirname(folder)) for folder in folders)


@pytest.mark.parametrize("ending", [f"sys.exit({processes.STOPPED})", "os.abort()"])
def test_process_that_ended_because_another_failed_is_not_the_first(ending):
    # Both have exited before the first check: the one that reports a lost worker is not the cause.
    text = f"{ending} if task['index'] == 0 else sys.exit(5)"
    launcher = Launcher(lambda task: script(text), workers=2)
    launcher._start_all([0, 1])
    for process in launcher._processes:
        process._popen.wait()
    assert launcher._wait([0, 1]).exit_code == 5


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        # A process that is killed takes others with it, whose error it may not recognize.
        (["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"], 128 + signal.SIGKILL),
        (["os.abort()", "os.kill(os.getpid(), signal.SIGSEGV)"], 128 + signal.SIGSEGV),
        (["sys.exit(75)", "os.abort()", "sys.exit(1)"], 1),
        (["sys.exit(75)", "os.abort()"], 128 + signal.SIGABRT),
    ],
)
def test_cause_is_selected_by_its_kind_if_several_processes_have_ended(endings, cause):
    text = f"exec({endings!r}[task['index']])"
    launcher = Launcher(lambda task: script(text), workers=len(endings))
    launcher._start_all(range(len(endings)))
    for process in launcher._processes:
        process._popen.wait()
    assert launcher._wait(range(len(endings))).exit_code == cause


@pytest.mark.parametrize(
    "ending", [f"os._exit({processes.STOPPED})", pytest.param("os.abort()", marks=pytest.mark.slow)]
)
def test_cause_may_exit_after_the_processes_that_noticed_it(ending, capfd, monkeypatch):
    monkeypatch.setattr(processes, "_CAUSE_TIMEOUT", 300.0)  # worker 1 may start late
    # Python's teardown of the process that failed takes a moment; the others exit at once.
    text = f"{ending} if task['index'] == 0 else (time.sleep(1), sys.exit(5))"
    pool = WorkerPool(2, minimum=1, rejoin_seconds=60.0)
    assert Launcher(lambda task: script(text), workers=2, pool=pool).run() == 5
    assert "worker 1 failed first (exit code 5)" in capfd.readouterr().err
    assert pool.slots() == [0, 1]


def test_consequence_without_another_failure_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(processes, "_CAUSE_TIMEOUT", 0.3)
    text = "os.abort() if task['index'] == 0 else time.sleep(60)"
    code = Launcher(lambda task: script(text), workers=2).run()
    assert code == 128 + signal.SIGABRT
    assert "worker 0 failed first (killed by SIGABRT)" in capfd.readouterr().err


def test_port_that_another_program_has_taken_is_not_a_user_error(capfd):
    # Between the choice of the launcher and the start of the process.
    text = (
        "import socket\n"
        "from ctl.errors import Failure\n"
        "from ctl.hardware import rendezvous, tf_config\n"
        "this = tf_config.parse(os.environ['TF_CONFIG'])\n"
        "other = socket.create_server(('', int(this.address.rpartition(':')[2])))\n"
        "try:\n"
        "    rendezvous.wait_for_others(this, timeout=1)\n"
        "except Failure as error:\n"
        "    print(error)\n"
    )
    assert Launcher(lambda task: script(text), workers=2).run() == 0
    assert capfd.readouterr().out.count(" cannot listen at localhost:") == 2


def test_failure_restarts_all_processes_with_a_new_command(tmp_path, capfd):
    commands = []

    def command(task):
        commands.append(task.name)
        return script("sys.exit(1)" if len(commands) == 2 else "time.sleep(0.5)")

    assert Launcher(command, workers=2, max_restarts=1).run() == 0
    assert commands == ["worker 0", "worker 1"] * 2
    assert "restarting all processes; 0 more restarts." in capfd.readouterr().err


def test_user_error_is_not_restarted(capfd):
    text = f"sys.exit({processes.USER_ERROR})"
    assert Launcher(lambda task: script(text), workers=1, max_restarts=5).run() == 2
    assert "restarting" not in capfd.readouterr().err


# The chief of parameter servers waits until the file exists; workers and servers never end.
CHIEF = """
if task['type'] == 'chief':
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    sys.exit(0)
if task == {'type': 'worker', 'index': 1} and not pathlib.Path(sys.argv[1] + '.lost').exists():
    pathlib.Path(sys.argv[1] + '.lost').touch()
    sys.exit(9)
if sys.argv[2] == 'restart' and task == {'type': 'worker', 'index': 1}:
    pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_lost_worker_of_parameter_servers_is_restarted_alone(tmp_path, capfd):
    command = [*script(CHIEF), str(tmp_path / "done"), "restart"]
    assert Launcher(lambda task: command, workers=2, servers=1, max_restarts=1).run() == 0
    assert capfd.readouterr().err == (
        "ctl.launch: worker 1 is lost (exit code 9); restarting it; 0 more restarts.\n"
    )


def test_chief_continues_without_a_lost_worker(tmp_path, capfd, monkeypatch):
    command = [*script(CHIEF), str(tmp_path / "done"), ""]
    print_line = processes._print

    def end_chief(text):
        print_line(text)
        (tmp_path / "done").touch()

    monkeypatch.setattr(processes, "_print", end_chief)
    assert Launcher(lambda task: command, workers=2, servers=1).run() == 0
    assert capfd.readouterr().err == (
        "ctl.launch: worker 1 is lost (exit code 9); the chief continues with the others.\n"
    )


def test_run_fails_when_the_last_worker_of_parameter_servers_is_lost(capfd):
    text = "sys.exit(9) if task['type'] == 'worker' else time.sleep(60)"
    launcher = Launcher(lambda task: script(text), workers=1, servers=1)
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
    launcher = Launcher(lambda task: stop_launcher(), workers=2)

    def stop_launcher():
        if not launcher._received:  # before the first process exists
            launcher._forward_signal(signal.SIGTERM, None)
        return script("time.sleep(600)")

    start = time.monotonic()
    assert launcher.run() in (processes.STOPPED, 128 + signal.SIGTERM)
    assert time.monotonic() - start < 300


# What the processes of a start do: SIGTERM saves, which takes a moment.
ACTIONS = """
def stop(*_):
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if sys.argv[1] in ('train', 'lose worker 1', 'train and fail') and task['index'] == 0:
    with open(os.path.join(sys.argv[2], 'events.jsonl'), 'a') as file:
        file.write('{"event": "resume"}\\n')
    markers = pathlib.Path(sys.argv[2], 'checkpoints')
    markers.mkdir(exist_ok=True)
    (markers / f'ckpt-{time.time_ns()}.whole').touch()
    pathlib.Path(sys.argv[2], 'begun').touch()
if sys.argv[1] == 'lose worker 1' and task['index'] == 1:
    while not os.path.exists(os.path.join(sys.argv[2], 'begun')):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == 'lose worker 1 early' and task['index'] == 1:
    os.kill(os.getpid(), signal.SIGKILL)
codes = {'end': 0, 'fail': 1, 'reject': 2, 'train and fail': 2}
# The other processes of a run that has trained wait, so that none fails before worker 0 has begun.
if sys.argv[1] in codes and (sys.argv[1] != 'train and fail' or task['index'] == 0):
    sys.exit(codes[sys.argv[1]])
time.sleep(60)
"""


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(elastic, "_CHECK_SECONDS", 0.1)


REJOIN_SECONDS = 500.0


class Clock:
    """A clock that can be set forward, by the time until a lost worker is tried again."""

    def __init__(self):
        self.offset = 0.0

    def __call__(self):
        return time.monotonic() + self.offset


def launch_elastic(starts, workdir, *, workers=3, minimum=2, **options):
    """Runs processes that do what is named for each start; returns the exit code and their numbers.

    Lost workers are back when a start trains.
    """
    numbers, remaining = [], iter(starts)
    current = ""
    clock = Clock()

    def command(task):
        nonlocal current
        if task.index == 0:
            current = next(remaining)
            numbers.append(task.num_workers)
            clock.offset += 2 * REJOIN_SECONDS if current == "train" else 0.0
        return [*script(ACTIONS), current, str(workdir)]

    pool = WorkerPool(workers, minimum=minimum, rejoin_seconds=REJOIN_SECONDS)
    limit = FailureLimit(workdir)
    with mock.patch.object(elastic, "time", types.SimpleNamespace(monotonic=clock)):
        code = Launcher(command, workers=workers, pool=pool, failure_limit=limit, **options).run()
    assert next(remaining, None) is None
    return code, numbers


def test_run_continues_without_a_killed_worker_and_later_with_it(tmp_path, capfd, fast):
    starts = ["lose worker 1", "train", "end"]
    assert launch_elastic(starts, tmp_path, max_restarts=1) == (0, [3, 2, 3])
    assert capfd.readouterr().err == (
        "ctl.launch: worker 1 failed first (killed by SIGKILL); stopping the other processes. Its "
        "last lines are above.\n"
        "ctl.launch: restarting all processes; 0 more restarts.\n"
        "ctl.launch: continuing with 2 of 3 workers.\n"
        "ctl.launch: 3 workers can run, not 2: the run saves, to continue with them.\n"
        "ctl.launch: continuing with 3 of 3 workers.\n"
    )


def test_run_is_not_stopped_before_it_has_saved(tmp_path, capfd, fast):
    text = (
        "def stop(*_):\n"
        "    sys.exit(75 if list(markers.glob('*')) else 99)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "markers = pathlib.Path(sys.argv[1], 'checkpoints')\n"
        "markers.mkdir(exist_ok=True)\n"
        "time.sleep(1)\n"
        "(markers / 'ckpt-10.whole').touch()\n"
        "time.sleep(60)\n"
    )
    numbers = []

    def command(task):
        numbers.append(task.num_workers)
        return script("") if task.num_workers == 2 else [*script(text), str(tmp_path)]

    pool = WorkerPool(2, minimum=1)
    pool.is_usable = lambda slot: slot == 0 or bool(numbers)
    limit = FailureLimit(tmp_path)
    assert Launcher(command, workers=2, pool=pool, failure_limit=limit).run() == 0
    assert numbers == [1, 2, 2]


def test_run_waits_for_enough_workers(monkeypatch):
    lines = []
    monkeypatch.setattr(processes, "_print", lines.append)
    monkeypatch.setattr(processes, "_REPORT_AFTER", 0.0)
    pool = WorkerPool(2)
    pool.is_usable = lambda slot: bool(lines)
    command = script("sys.exit(0)")
    assert Launcher(lambda task: command, workers=2, pool=pool, wait_seconds=60.0).run() == 0
    assert lines == ["fewer than 2 workers can run; waiting for them, up to 60 s."]


TOO_FEW = "ctl.launch: fewer than 2 workers can run: rerun the same command later.\n"
USELESS = (
    "ctl.launch: not restarted: the run fails again and again without a new checkpoint. Fix what its "
    "last lines report, then rerun the same command.\n"
)
# Each: what the processes do at each start, the options, the exit code, the numbers of workers.
ELASTIC = {
    "a loss is a restart":
        (["lose worker 1"], dict(max_restarts=0), 137, [3], ""),
    "the code of the loss, if too few workers remain":
        (["lose worker 1"], dict(workers=2, max_restarts=1, wait_seconds=0.2), 137, [2], TOO_FEW),
    "a program that fails twice is neither restarted again nor shrunk":
        (["fail", "fail"], {}, 1, [3, 3], USELESS),
    "a number that the program rejects is skipped":
        (["lose worker 1", "reject", "train", "end"], dict(workers=4), 0, [4, 3, 2, 4],
         "the run cannot have 3 workers; trying another number."),
    "an error of the first start ends the run":
        (["reject"], {}, 2, [3], ""),
    "an error with a number that has trained ends the run":
        (["lose worker 1", "train", "reject"], {}, 2, [3, 2, 3], ""),
    "an error in training with such a number":
        (["lose worker 1", "train", "train and fail"], {}, 2, [3, 2, 3], ""),
    "an error in training does not mean that the number is not allowed":
        (["lose worker 1", "train and fail"], dict(workers=4), 2, [4, 3], ""),
    "a number is allowed only once the run has begun to train":
        (["lose worker 1 early", "reject"], dict(workers=4), 2, [4, 3], ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "options", "code", "numbers", "line"), ELASTIC.values(), ids=ELASTIC
)
def test_elastic_run(tmp_path, capfd, fast, starts, options, code, numbers, line):
    # Earlier runs of the workdir have left events, the last of which is cut off.
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sta\n')
    options = {"max_restarts": 9, **options}
    assert launch_elastic(starts, tmp_path, **options) == (code, numbers)
    assert line in capfd.readouterr().err


def test_each_slot_keeps_its_gpus(tmp_path, fast):
    gpus = []

    def command(task):
        gpus.append((task.num_workers, launcher._gpus[task.name]["CUDA_VISIBLE_DEVICES"]))
        action = "lose worker 1" if task.num_workers == 3 else "end"
        return [*script(ACTIONS), action, str(tmp_path)]

    pool = WorkerPool(3, minimum=2, rejoin_seconds=REJOIN_SECONDS, gpus=["a", "b", "c"])
    launcher = Launcher(command, workers=3, pool=pool, max_restarts=1)
    assert launcher.run() == 0
    assert gpus == [(3, "a"), (3, "b"), (3, "c"), (2, "a"), (2, "c")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_the_launcher_waits_ends_it(number):
    pool = WorkerPool(2)
    launcher = Launcher(lambda task: script(""), workers=2, pool=pool, wait_seconds=60.0)
    pool.slots = lambda: launcher._forward_signal(number, None) or []
    assert launcher.run() == processes.STOPPED


def test_signal_while_the_run_saves_to_grow_stops_it_without_a_second_signal(tmp_path, fast):
    # A second signal would end a process in the middle of its save.
    text = (
        "def stop(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(60)\n"
    )
    command = [*script(text), str(tmp_path / "ready")]
    pool = WorkerPool(2, minimum=1)
    pool.is_usable = lambda slot: slot == 0 or (tmp_path / "ready").exists()
    launcher = Launcher(lambda task: command, workers=2, pool=pool, max_restarts=3)
    assert launcher.run() == 75
