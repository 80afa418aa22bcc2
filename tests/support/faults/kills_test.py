"""A kill arrives exactly at its point, once, and a run that survives it is not changed by it."""

import signal

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support import reference_model
from tests.support.faults.kills import killing


def make_trainer():
    return reference_model.make_trainer(
        testing.make_strategy(1), 7, optimizer=lambda: tf_keras.optimizers.Adam(1e-2)
    )


def state(trainer):
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


@pytest.mark.slow
def test_kill_at_a_step_arrives_when_the_step_is_finished(observe_signal):
    trainer, undisturbed = make_trainer(), make_trainer()
    steps = observe_signal(lambda: int(trainer.global_step.numpy()))
    for when in ("start", "step:13", "step:30", "step:31", "step:10"):  # the last one is over
        with killing(when, by=signal.SIGUSR1):
            trainer.train(tf.constant(10))
    assert steps == [0, 13, 30, 31] and trainer.global_step.numpy() == 50
    undisturbed.train(tf.constant(50))
    for value, expected in zip(state(trainer), state(undisturbed), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.slow
def test_kill_in_a_save_arrives_between_the_files_and_the_marker(observe_signal, tmp_path):
    trainer, files = make_trainer(), CheckpointFiles(tmp_path)
    seen = observe_signal(lambda: (files.steps(), files.faults(), sorted(tmp_path.glob("ckpt-2*"))))
    checkpoints = Checkpointer(tmp_path, trainer)
    with killing("save:2", by=signal.SIGUSR1):
        for _ in range(3):
            trainer.train(tf.constant(1))
            checkpoints.save()
    paths = [tmp_path / "ckpt-2.data-00000-of-00001", tmp_path / "ckpt-2.index"]
    assert seen == [([1], {2: "it was not written to the end"}, paths)]
    assert files.steps() == [1, 2, 3]


def test_kill_in_an_evaluation_arrives_when_it_begins(observe_signal):
    evaluator, evaluations = ctl.StandardEvaluator(make_trainer(), global_batch_size=5), []
    seen = observe_signal(lambda: len(evaluations))
    with killing("eval:2", by=signal.SIGUSR1):
        for _ in range(3):
            evaluations.append(evaluator.evaluate(tf.constant(-1)))
    assert seen == [1]


@pytest.mark.slow
def test_no_signal_splits_the_loop_in_the_same_way(monkeypatch):
    trainer, calls = make_trainer(), []
    train = ctl.StandardTrainer.train
    monkeypatch.setattr(
        ctl.StandardTrainer, "train", lambda self, n: (calls.append(int(n)), train(self, n))[1]
    )
    with killing("step:3", by=None):
        trainer.train(tf.constant(10))
    assert calls == [3, 7]


def test_patched_methods_are_restored_after_the_block():
    classes = (ctl.StandardTrainer, ctl.StandardEvaluator, CheckpointFiles)
    before = [dict(vars(cls)) for cls in classes]
    for when in ("start", "step:1", "save:1", "eval:1"):
        with killing(when):
            assert [dict(vars(cls)) for cls in classes] != before
    # Also without a copy of a method that a class inherits.
    assert [dict(vars(cls)) for cls in classes] == before


@pytest.mark.parametrize("when", ["step", "step:0", "step:-1", "start:1", "stop:3", "save:x", ""])
def test_unknown_point_is_an_error(when):
    with pytest.raises(ctl.UsageError, match="start, step:K, save:N, eval:N"), killing(when):
        pass
