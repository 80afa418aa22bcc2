"""Which workers can run, with a fake clock; and when a restart is of no use."""

import types

import pytest

from ctl.hardware import elastic, gpu
from ctl.hardware.elastic import FailureLimit, WorkerPool


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the workers by `clock.now`."""
    clock = types.SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(elastic, "time", clock)
    return clock


def test_all_slots_run_by_default_whatever_is_lost():
    pool = WorkerPool(2)
    pool.lose(1)
    assert pool.slots() == [0, 1]
    assert not pool.must_change([0, 1])


def test_lost_worker_is_tried_again_after_the_time(clock):
    pool = WorkerPool(3, minimum=2, rejoin_seconds=300)
    pool.lose(1)
    assert pool.slots() == [0, 2]
    clock.now += 299
    assert pool.slots() == [0, 2]
    clock.now += 1
    assert pool.slots() == [0, 1, 2]


def test_worker_that_is_lost_again_soon_is_tried_half_as_often(clock):
    pool = WorkerPool(2, minimum=1, rejoin_seconds=100)
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
    pool = WorkerPool(3, minimum=2, rejoin_seconds=300)
    pool.lose(0)
    pool.lose(1)
    assert pool.slots() == []


def test_change_is_due_once_two_checks_agree(clock):
    pool = WorkerPool(3, minimum=2, rejoin_seconds=60)
    pool.lose(2)
    due = []
    for _ in range(90):
        clock.now += 1
        due.append(pool.must_change([0, 1]))
    first = due.index(True)
    assert 60 < first <= 72
    assert not pool.must_change([0, 1, 2])


def test_number_that_the_config_does_not_allow_is_skipped(clock):
    pool = WorkerPool(4, minimum=2, rejoin_seconds=60)
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


def test_slot_is_used_while_the_driver_reports_its_gpus(monkeypatch):
    reported = {"GPU-a", "GPU-b", "GPU-c"}
    monkeypatch.setattr(gpu, "is_reported", lambda name: name in reported)
    # The last one is not reported from the start on.
    names = ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"]
    pool = WorkerPool(3, minimum=1, gpus=names)
    assert pool.slots() == [0]
    reported.add("GPU-d")
    assert pool.slots() == [0, 1]
    reported.remove("GPU-b")
    assert pool.slots() == [1]


@pytest.mark.parametrize(
    ("gpus", "is_reported", "slots"),
    [
        (["GPU-a", "GPU-b"], True, [0, 1]),  # a slot without a GPU, next to those with one
        (["0"], False, [0, 1, 2]),  # without a driver they are not checked
        ([], False, [0, 1, 2]),
    ],
)
def test_slots_of_a_machine_with_few_gpus(monkeypatch, gpus, is_reported, slots):
    monkeypatch.setattr(gpu, "is_reported", lambda name: is_reported)
    assert WorkerPool(3, minimum=1, gpus=gpus).slots() == slots


def test_failures_without_a_new_checkpoint_are_limited(tmp_path):
    (tmp_path / "checkpoints").mkdir()

    def save(step):
        (tmp_path / f"checkpoints/ckpt-{step}.whole").touch()

    save(10)
    limit = FailureLimit(tmp_path)
    assert not limit.is_reached(is_loss=False)
    save(20)
    assert not limit.is_reached(is_loss=False)  # the run got on since the last failure
    assert limit.is_reached(is_loss=False)


def test_run_has_saved_once_there_is_a_checkpoint_that_was_not_there_at_its_start(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/ckpt-10.whole").touch()
    limit = FailureLimit(tmp_path)
    limit.record_start()
    assert not limit.has_saved()
    (tmp_path / "checkpoints/ckpt-10.whole").unlink()  # as of a checkpoint that is too old
    assert not limit.has_saved()
    (tmp_path / "checkpoints/ckpt-20.whole").touch()
    assert limit.has_saved()
    limit.record_start()
    assert not limit.has_saved()


def test_machines_may_be_lost_one_after_the_other_while_the_run_starts(tmp_path):
    limit = FailureLimit(tmp_path)
    assert [limit.is_reached(is_loss=True) for _ in range(3)] == [False, False, True]
