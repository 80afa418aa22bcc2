"""When a run saves."""

import errno
import os
import threading

import pytest

from ctl.errors import Failure
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.timing import Every
from tests.loop.shared import Recording, make_reference


@pytest.fixture(scope="module")
def trainer():
    """A trainer whose counter the tests set."""
    return make_reference()


def test_restore_before_a_step_takes_an_older_checkpoint(trainer, tmp_path):
    manager = CheckpointManager(trainer, Checkpointer(tmp_path, trainer), Recording(trainer))
    for step in (5, 8):
        trainer.global_step.assign(step)
        manager.save()
    assert manager.all_restore(before=8) == (manager.checkpoints.path(5), {})
    assert (manager.saved_step, int(trainer.global_step.numpy())) == (5, 5)
    assert manager.all_restore(manager.checkpoints.path(8))[0] == manager.checkpoints.path(8)


def test_checkpoint_is_recorded_when_it_is_complete(trainer, tmp_path, monkeypatch):
    is_released = threading.Event()
    fsync = os.fsync
    checkpoints = Checkpointer(tmp_path, trainer, background=True)
    recording = Recording(trainer)
    manager = CheckpointManager(trainer, checkpoints, recording, Every(steps=4))
    monkeypatch.setattr(os, "fsync", lambda file: is_released.wait(60) and fsync(file))
    trainer.global_step.assign(4)
    manager.save()
    assert not recording.steps("checkpoint")
    is_released.set()
    manager.wait()
    assert recording.steps("checkpoint") == [("checkpoint", 4)]


def test_failed_sync_is_reported_with_its_own_checkpoint(trainer, tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path, trainer, background=True)
    manager = CheckpointManager(trainer, checkpoints, Recording(trainer))
    fsync = os.fsync

    def fail(file):
        if os.path.samestat(os.fstat(file), tmp_path.stat()) and [*tmp_path.glob("ckpt-4.whole")]:
            raise OSError(errno.EIO, "Input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail)
    trainer.global_step.assign(4)
    manager.save()
    trainer.global_step.assign(8)
    with pytest.raises(Failure, match=r"ckpt-4 .*Input/output error"):
        manager.save()
    checkpoints.close()


def test_without_checkpoints_nothing_can_be_restored(trainer):
    with pytest.raises(ValueError, match="Nothing to restore from"):
        CheckpointManager(trainer, None, Recording(trainer)).all_restore()
