"""Which workers can run, with a fake clock; no process but commands of the shell."""

import pathlib
import time

import pytest

from ctl.errors import UsageError
from ctl.hardware import elastic, gpu
from ctl.hardware.elastic import AvailabilityCommand, WorkerPool
from tests import child


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_all_slots_run_by_default_whatever_is_lost():
    pool = WorkerPool(2)
    pool.lose(1)
    assert pool.slots() == [0, 1]
    assert not pool.must_change([0, 1])


def test_lost_worker_is_tried_again_after_the_time(clock):
    pool = WorkerPool(3, minimum=2, rejoin_seconds=300, clock=clock)
    pool.lose(1)
    assert pool.slots() == [0, 2]
    clock.now += 299
    assert pool.slots() == [0, 2]
    clock.now += 1
    assert pool.slots() == [0, 1, 2]


def test_worker_that_is_lost_again_soon_is_tried_half_as_often(clock):
    pool = WorkerPool(2, minimum=1, rejoin_seconds=100, clock=clock)
    waits = []
    for pause in (0, 0, 500):
        clock.now += pause
        pool.lose(1)
        lost = clock.now
        while pool.slots() == [0]:
            clock.now += 50
        waits.append(clock.now - lost)
    assert waits == [100, 200, 100]


def test_no_slots_if_fewer_than_the_minimum_can_run(clock):
    pool = WorkerPool(3, minimum=2, rejoin_seconds=300, clock=clock)
    pool.lose(0)
    pool.lose(1)
    assert pool.slots() == []


def test_slot_without_its_hardware_is_not_used():
    pool = WorkerPool(3, minimum=1, is_usable=lambda slot: slot != 0)
    assert pool.slots() == [1, 2]


def test_change_is_due_once_two_checks_agree(clock):
    pool = WorkerPool(3, minimum=2, rejoin_seconds=60, clock=clock)
    pool.lose(2)
    due = []
    for _ in range(90):
        clock.now += 1
        due.append(pool.must_change([0, 1]))
    first = due.index(True)
    assert 60 < first <= 72
    assert not pool.must_change([0, 1, 2])


def test_number_that_the_config_does_not_allow_is_skipped(clock):
    pool = WorkerPool(4, minimum=2, rejoin_seconds=60, clock=clock)
    pool.accept(4)
    pool.lose(3)
    assert pool.slots() == [0, 1, 2]
    assert pool.reject(3)
    assert pool.slots() == [0, 1]
    clock.now += 60
    assert pool.slots() == [0, 1, 2, 3]


def test_error_of_every_number_is_none_of_the_number():
    pool = WorkerPool(3, minimum=1)
    assert not pool.reject(3)  # at the first start
    pool = WorkerPool(3, minimum=1)
    pool.accept(3)
    assert pool.reject(2)
    assert not pool.reject(3)


class Command:
    """Stands in for the command of the user."""

    def __init__(self, number):
        self.number = number
        self.answer_time = 0.0

    def read(self):
        return self.number

    def refresh(self):
        self.number = None


def test_command_determines_the_number_in_place_of_the_losses(clock):
    command = Command(None)
    pool = WorkerPool(3, minimum=2, rejoin_seconds=60, command=command, clock=clock)
    assert pool.slots() == [] and not pool.is_known()
    command.number = 5
    assert pool.slots() == [0, 1, 2] and pool.is_known()
    pool.lose(0)
    command.number = 3
    assert pool.slots() == [0, 1, 2]
    command.number = 2
    assert pool.slots() == [1, 2]  # without the one that was lost
    command.number = 1
    assert pool.slots() == []


def check_due(answers, clock, *, running, seconds=30.0):
    """Checks once per answer, which are 5 s apart; returns after which of them a change is due.

    An answer None stands for a command that fails: its last number remains valid.
    """
    command = Command(len(running))
    pool = WorkerPool(3, minimum=1, rejoin_seconds=seconds, command=command, clock=clock)
    due = []
    for index, answer in enumerate(answers):
        clock.now += 5
        if answer is not None:
            command.number, command.answer_time = answer, clock.now
        if pool.must_change(running):
            due.append(index)
    return due


def test_answer_must_be_the_same_for_a_time_before_a_run_is_stopped_for_it(clock):
    assert check_due([2, 3, 3, 3, 3, 3, 3, 3, 3], clock, running=[0, 1]) == [7, 8]
    assert check_due([2, 3, 3, 3, 3, 3, 3, 2, 3, 3, 3], clock, running=[0, 1]) == []
    # Two answers are required for a time of 0, too.
    assert check_due([2, 3, 2, 3, 3], clock, running=[0, 1], seconds=0.0) == [4]


@pytest.mark.parametrize("period", [1, 2, 3, 6])
def test_command_whose_answers_flap_stops_no_run(clock, period):
    answers = ([3] * period + [2] * period) * 10
    assert check_due(answers, clock, running=[0, 1, 2]) == []


def test_answers_above_the_workers_of_the_run_count_as_the_same(clock):
    assert check_due([4, 6, 5, 3, 4, 6, 5], clock, running=[0, 1]) == [6]


def test_one_answer_of_a_command_that_then_fails_stops_no_run(clock):
    assert check_due([3, 2, *[None] * 20], clock, running=[0, 1, 2]) == []
    assert check_due([3, 2, *[None] * 5, 2], clock, running=[0, 1, 2]) == [7]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def read(command, clock):
    """Lets a command run once."""
    clock.now += 10
    command.read()
    wait_until(lambda: command._process is None or command._process.poll() is not None)
    return command.read()


def test_last_line_of_a_command_is_the_number(tmp_path, clock):
    lines = []
    command = AvailabilityCommand(f"cat {tmp_path}/n", print_line=lines.append, clock=clock)
    (tmp_path / "n").write_text("hosts: a b c\n3\n\n")
    assert command.read() is None
    assert read(command, clock) == 3
    (tmp_path / "n").write_text("2")
    assert command.read() == 3
    assert read(command, clock) == 2
    assert command.answer_time == clock.now
    answer_time = clock.now
    (tmp_path / "n").unlink()
    assert read(command, clock) == read(command, clock) == 2
    assert command.answer_time == answer_time
    (line,) = lines
    assert "ends with exit code 1 and prints" in line
    assert line.endswith("its last number, 2, remains valid.")


def test_number_from_before_a_loss_is_not_used(tmp_path, clock):
    command = AvailabilityCommand(f"cat {tmp_path}/n", print_line=print, clock=clock)
    pool = WorkerPool(3, minimum=1, command=command, clock=clock)
    (tmp_path / "n").write_text("3")
    assert read(command, clock) == 3
    (tmp_path / "n").write_text("2")
    pool.lose(1)
    assert pool.slots() == []
    assert read(command, clock) == 2
    assert pool.slots() == [0, 2]
    (tmp_path / "n").unlink()  # a command that fails leaves the last number
    pool.lose(2)
    assert read(command, clock) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo two", "ends with exit code 0 and prints 'two': fix it."),
        ("echo -1", "ends with exit code 0 and prints '-1': fix it."),
        ("printf %05000d 3", f"ends with exit code 0 and prints '{'0' * 100}': fix it."),
        ("true", "ends with exit code 0 and prints '': fix it."),
        ("echo 3; false", "ends with exit code 1 and prints '3': fix it."),
    ],
)
def test_command_that_prints_no_number_at_first_is_a_user_error(clock, text, problem):
    command = AvailabilityCommand(text, print_line=print, clock=clock)
    with pytest.raises(UsageError) as raised:
        read(command, clock)
    assert str(raised.value) == (
        f"The command of --available, {text!r}, must print the number of workers that can run, but "
        f"{problem}"
    )


def test_command_that_does_not_end_is_killed(clock):
    command = AvailabilityCommand("echo 4; sleep 60", print_line=print, clock=clock)
    assert command.read() is None
    process = command._process
    clock.now += 31
    with pytest.raises(UsageError, match="does not end"):
        command.read()
    assert process.poll() is not None


def test_command_does_not_outlive_a_process_that_is_killed(tmp_path):
    text = (
        "import time\n"
        "from ctl.hardware.elastic import AvailabilityCommand\n"
        f"command = 'echo $$ > {tmp_path}/pid; sleep 61; true'\n"
        "AvailabilityCommand(command, print_line=print).read()\n"
        "time.sleep(60)\n"
    )
    with child.start(["-c", text]) as process:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))


def test_slot_is_usable_while_the_driver_reports_its_gpus(monkeypatch):
    reported = {"GPU-a", "GPU-b", "GPU-c"}
    monkeypatch.setattr(gpu, "is_reported", lambda name: name in reported)
    # The last one is not reported from the start on.
    is_usable = elastic.make_gpu_check(3, ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"])
    assert [is_usable(slot) for slot in range(3)] == [True, False, False]
    reported.add("GPU-d")
    assert [is_usable(slot) for slot in range(3)] == [True, True, False]
    reported.remove("GPU-b")
    assert [is_usable(slot) for slot in range(3)] == [False, True, False]


def test_slots_without_a_gpu_are_not_usable_next_to_those_with_one(monkeypatch):
    monkeypatch.setattr(gpu, "is_reported", lambda name: True)
    is_usable = elastic.make_gpu_check(3, ["GPU-a", "GPU-b"])
    assert [is_usable(slot) for slot in range(3)] == [True, True, False]


def test_gpus_without_a_driver_that_reports_them_are_not_checked(monkeypatch):
    monkeypatch.setattr(gpu, "is_reported", lambda name: False)
    assert elastic.make_gpu_check(1, ["0"])(0)


def test_slots_of_a_machine_without_gpus_are_usable():
    is_usable = elastic.make_gpu_check(2, [])
    assert is_usable(0) and is_usable(1)
