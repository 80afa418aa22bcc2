"""A kill arrives exactly at its point, once, and a run that survives it is not changed by it."""

import signal

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support import faulty_trainers, reference_model
from tests.support.faults.kills import killing


def make_trainer():
    return reference_model.make_trainer(
        testing.make_strategy(1), 7, optimizer=lambda: tf_keras.optimizers.Adam(1e-2)
    )


@pytest.fixture
def observe_signal():
    """Returns the list of the results of a function, which is called when SIGUSR1 arrives."""
    before = signal.getsignal(signal.SIGUSR1)

    def observe(function):
        results = []
        signal.signal(signal.SIGUSR1, lambda *_: results.append(function()))
        return results

    yield observe
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_kill_arrives_when_the_step_is_finished_or_between_a_checkpoint_and_its_marker(
    observe_signal, tmp_path
):
    trainer, undisturbed, files = make_trainer(), make_trainer(), CheckpointFiles(tmp_path)
    checkpoints = Checkpointer(tmp_path, trainer)
    seen = observe_signal(lambda: (int(trainer.global_step.numpy()), files.steps(), files.faults()))
    for when in ("step:31", "step:13", "step:30", "step:10"):  # the last one is over
        with killing(when, by=signal.SIGUSR1):
            trainer.train(tf.constant(10))
    assert [step for step, *_ in seen] == [13, 30] and trainer.global_step.numpy() == 40
    undisturbed.train(tf.constant(40))
    faulty_trainers.same(*map(faulty_trainers.state, (trainer, undisturbed)))
    with killing("save:2", by=signal.SIGUSR1):
        for _ in range(3):
            checkpoints.save()
            trainer.train(tf.constant(1))
    assert seen[2:] == [(41, [40], {41: "it was not written to the end"})]
    assert files.steps() == [40, 41, 42]


def test_kill_in_an_evaluation_arrives_when_it_begins(observe_signal):
    evaluator, evaluations = ctl.StandardEvaluator(make_trainer(), global_batch_size=5), []
    seen = observe_signal(lambda: len(evaluations))
    with killing("eval:2", by=signal.SIGUSR1):
        for _ in range(3):
            evaluations.append(evaluator.evaluate(tf.constant(-1)))
    assert seen == [1]
