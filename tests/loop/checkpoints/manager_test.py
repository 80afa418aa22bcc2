"""When a run saves."""

import pytest

from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.timing import Every
from tests.loop.shared import OtherProcesses, Recording, make_reference


@pytest.fixture(scope="module")
def trainer():
    """A trainer whose counter the tests set."""
    return make_reference()


@pytest.fixture
def make(trainer, tmp_path):
    def build(**every):
        checkpoints = Checkpointer(tmp_path, trainer)
        return CheckpointManager(trainer, checkpoints, Recording(trainer), Every(**every))

    trainer.global_step.assign(0)
    return build


def test_checkpoint_is_due_at_multiples_of_the_interval_without_a_collective(make, trainer):
    manager, processes, due = make(steps=4), OtherProcesses(), []
    for step in range(1, 13):
        trainer.global_step.assign(step)
        due.append(manager.all_due(processes))
    assert [step for step, is_due in enumerate(due, 1) if is_due] == [4, 8, 12]
    assert make(steps=4, seconds=60.0).all_due(processes)
    assert not processes.calls


def test_checkpoint_is_due_by_the_chiefs_time_since_the_last_one(make, clock):
    manager = make(seconds=60.0)
    for seconds, is_due in ((59.0, False), (1.0, True)):
        clock.now += seconds
        assert manager.all_due(ProcessGroup()) == is_due
    manager.save()
    assert not manager.all_due(ProcessGroup())
    for chief_is_due in (True, False):  # and this process's own clock differs
        chief = OtherProcesses(of_chief=int(chief_is_due))
        assert manager.all_due(chief) == chief_is_due and len(chief.calls) == 1
        clock.now += 60.0


def test_restore_before_a_step_takes_an_older_checkpoint(make, trainer):
    manager = make()
    for step in (5, 8):
        trainer.global_step.assign(step)
        manager.save()
    assert manager.all_restore(before=8) == (manager.checkpoints.path(5), {})
    assert (manager.saved_step, int(trainer.global_step.numpy())) == (5, 5)
    assert manager.all_restore(manager.checkpoints.path(8))[0] == manager.checkpoints.path(8)


def test_without_checkpoints_nothing_is_saved_and_nothing_can_be_restored(trainer):
    manager = CheckpointManager(trainer, None, Recording(trainer))
    manager.save()
    manager.wait()
    with pytest.raises(ValueError, match="Nothing to restore from"):
        manager.all_restore()
