"""When a run saves."""

import pytest
import tensorflow as tf

from ctl import testing
from ctl.errors import Failure
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from tests import reference_model


@pytest.fixture(scope="module")
def trainer():
    """A trainer whose counter the tests set."""
    return reference_model.make_trainer(testing.make_strategy(1), 8)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def make(trainer, tmp_path):
    def build(**options):
        events = []
        manager = CheckpointManager(
            trainer,
            Checkpointer(tmp_path, trainer),
            on_event=lambda name, step, **fields: events.append((name, step, fields)),
            clock=Clock(),
            **options,
        )
        manager.events = events
        return manager

    trainer.global_step.assign(0)
    return build


def test_checkpoint_is_due_at_multiples_of_the_interval(make, trainer):
    manager = make(interval=4)
    due = []
    for step in range(1, 13):
        trainer.global_step.assign(step)
        due.append(manager.is_due_by_step())
    assert [step for step, is_due in enumerate(due, 1) if is_due] == [4, 8, 12]
    assert not manager._timer.is_due()


def test_checkpoint_is_due_by_time_since_the_last_one(make):
    manager = make(seconds=60.0)
    manager._timer._clock.now += 59.0
    assert not manager._timer.is_due() and not manager.is_due_by_step()
    manager._timer._clock.now += 1.0
    assert manager._timer.is_due()
    manager.save()
    assert not manager._timer.is_due()


class Processes:
    """Processes whose chief's clock decides; counts the collective calls."""

    def __init__(self, chief_is_due):
        self.chief_is_due, self.calls = chief_is_due, 0

    def broadcast_from_chief(self, value):
        self.calls += 1
        return int(self.chief_is_due)


@pytest.mark.parametrize("chief_is_due", [False, True])
def test_the_clock_of_the_chief_decides_in_every_process(make, chief_is_due):
    manager, processes = make(seconds=60.0), Processes(chief_is_due)
    manager._timer._clock.now += 0.0 if chief_is_due else 90.0  # this process's own clock differs
    assert manager.all_due(processes) == chief_is_due
    assert processes.calls == 1


def test_processes_communicate_only_if_the_time_decides(make, trainer):
    processes = Processes(chief_is_due=False)
    trainer.global_step.assign(4)
    assert make(interval=4, seconds=60.0).all_due(processes)
    assert make(interval=4).all_due(processes)
    assert not make(interval=3).all_due(processes)
    assert processes.calls == 0


def test_step_is_saved_once_and_recorded(make, trainer):
    manager = make()
    trainer.global_step.assign(5)
    manager.save()
    manager.save()
    path = manager.checkpoints.path(5)
    assert manager.events == [("checkpoint", 5, {"path": path})]


def test_restored_step_is_not_saved_again(make, trainer):
    trainer.global_step.assign(5)
    make().save()
    trainer.global_step.assign(0)
    manager = make()
    assert manager.all_restore() == manager.checkpoints.path(5)
    assert (manager.saved_step, int(trainer.global_step.numpy())) == (5, 5)
    manager.save()
    assert manager.events == []


def test_restore_before_a_step_takes_an_older_checkpoint(make, trainer):
    manager = make()
    for step in (5, 8):
        trainer.global_step.assign(step)
        manager.save()
    assert manager.all_restore(before=8) == manager.checkpoints.path(5)


def test_weight_that_is_not_finite_is_not_saved(make, trainer):
    manager = make()
    weight = trainer.model.trainable_variables[0]
    value = weight.numpy()
    weight.assign(tf.fill(weight.shape, tf.constant(float("inf"), weight.dtype)))
    with pytest.raises(Failure, match="is not finite after step 0, which is not saved"):
        manager.save()
    weight.assign(value)
    assert manager.checkpoints.latest_step() is None


def test_without_checkpoints_nothing_is_saved_and_nothing_can_be_restored(trainer):
    manager = CheckpointManager(trainer, None)
    manager.save()
    manager.wait()
    with pytest.raises(ValueError, match="Nothing to restore from"):
        manager.all_restore()
