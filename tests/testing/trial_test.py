"""What a trial compares, rejects, and reports."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.testing import trial
from ctl.testing.splits import Split
from ctl.testing.subjects import base
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery

UNEVEN = Split(5, replicas=2)


def make_subject(cls=gallery.Right, *, examples=None, optimizer=None, steps=2):
    return TrainerSubject(cls, examples or gallery.examples(), steps, optimizer=optimizer)


class PerReplicaRate(tf_keras.optimizers.SGD):
    """An optimizer that depends on the number of replicas."""

    def apply_gradients(self, pairs, **arguments):
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        super().apply_gradients([(g / replicas, v) for g, v in pairs], **arguments)


@pytest.mark.slow
def test_users_optimizer_is_compared_in_addition_to_plain_sgd():
    # diagnosis/sharding_test.py has an optimizer that passes.
    report = trial.run(make_subject(optimizer=lambda: PerReplicaRate(0.1), steps=1), [UNEVEN])
    assert "1/2 times the value on one replica. There was no difference under plain SGD" in (
        report.failure()
    )


@pytest.mark.slow
def test_rejected_splits_are_reported_and_are_not_failures():
    splits = [UNEVEN, Split(5, replicas=2, micro_batches=2)]
    report = trial.run(make_subject(gallery.Normalized, steps=1), splits)
    assert report.equivalent
    assert report.compared == (UNEVEN,)
    (reason,) = report.refused.values()
    assert "micro-batch" in reason


def test_trainer_that_is_rejected_on_every_split_is_an_error():
    with pytest.raises(UsageError, match=r"ctl rejects every split: .*micro-batch"):
        trial.run(make_subject(gallery.Normalized), [Split(5, micro_batches=2)])


class SecondNearest(gallery.Right):
    """Compares each row with the two nearest of the global batch, of which there must be two."""

    def per_example_loss(self, batch, outputs):
        rows = ctl.replica.all_gather(outputs)
        distance = tf.reduce_sum((outputs[:, tf.newaxis] - rows) ** 2, axis=2)
        nearest = tf.math.top_k(-distance, k=2).values
        return super().per_example_loss(batch, outputs) - tf.reduce_sum(nearest, axis=1)


@pytest.mark.slow
def test_batch_of_one_row_is_not_compared_if_the_loss_requires_more():
    splits = [UNEVEN, Split(1, replicas=2)]
    report = trial.run(make_subject(SecondNearest, steps=1), splits)
    assert report.equivalent and report.compared == (UNEVEN,)
    assert "a batch of one row fails on one replica too" in report.refused[splits[1]]


@pytest.mark.slow
def test_batch_of_one_row_that_fails_on_one_replica_too_is_an_error_by_itself():
    with pytest.raises(Exception, match="input must have at least k columns"):
        trial.run(make_subject(SecondNearest, steps=1), [Split(1, replicas=2)])


def test_loss_that_is_not_finite_cannot_be_compared():
    examples = gallery.examples()
    examples["x"][0] = np.nan
    with pytest.raises(
        UsageError, match=r"The loss is not finite on 1 replica \(5 rows\) at step 0"
    ):
        trial.run(make_subject(examples=examples), [UNEVEN])


@pytest.mark.slow
def test_one_split_per_number_of_replicas_is_evaluated(monkeypatch):
    evaluated = []
    record = base.SplitRun.record

    def observe(run, *arguments, evaluate=False, **keywords):
        if evaluate:
            evaluated.append(run.split)
        return record(run, *arguments, evaluate=evaluate, **keywords)

    monkeypatch.setattr(base.SplitRun, "record", observe)
    splits = [Split(4, replicas=2), UNEVEN, Split(4, micro_batches=2)]
    assert trial.run(make_subject(steps=1), splits).equivalent
    assert evaluated == [Split(5), UNEVEN]


def test_trial_needs_split_cpus_and_no_current_strategy():
    assert trial.can_run_here(4)
    assert not trial.can_run_here(5)
    with testing.make_strategy(2).scope():
        assert not trial.can_run_here(2)
