"""Which workers can run, with a fake clock."""

import pytest

from ctl.hardware import elastic, gpu
from ctl.hardware.elastic import WorkerPool


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
