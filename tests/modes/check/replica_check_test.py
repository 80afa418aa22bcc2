"""An update that depends on the split of the batch is detected in a process of its own."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
from unittest import mock

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.modes import check
from ctl.modes.check import replica_check
from ctl.modes.check.outcome import FAIL, PASS, Outcome
from ctl.testing.diagnosis import causes
from ctl.testing.equivalence_report import Difference, Report
from ctl.testing.splits import Split

MEAN_OVER_THE_LOCAL_BATCH = """
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return tf.fill(tf.shape(losses), tf.reduce_mean(losses))
    """


@pytest.mark.slow
def test_a_mean_over_the_local_batch_fails(make_factory):
    # In a thread of this process; checks_test.py compares in other processes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        factory = make_factory(MEAN_OVER_THE_LOCAL_BATCH)
        outcome = replica_check.start(factory, thread, quick=True)()
    assert outcome.verdict == FAIL, outcome
    assert outcome.observation.startswith("loss on 2 + 2 rows: ")
    assert outcome.fix == causes.PER_EXAMPLE.format(hook="per_example_loss")


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "verdict"), [(0, PASS), (1, FAIL)])
def test_a_part_of_the_update_is_checked(make_factory, factor, verdict):
    body = f"""
    def transform_gradients(self, gradients, variables):
        new = []
        for gradient in map(tf.convert_to_tensor, gradients):
            noise = ctl.random.normal(gradient.shape, dtype=gradient.dtype)
            if {factor}:  # rejected as a number of the replica
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                noise += tf.cast(replica, noise.dtype)
            new.append(gradient + noise)
        return new
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        outcome = replica_check.start(make_factory(body), thread, quick=True)()
    assert outcome.verdict == verdict, outcome


def describe_process():
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def test_the_processes_are_forks_until_tensorflow_has_listed_its_devices(monkeypatch):
    methods = []
    original = multiprocessing.get_context

    def get_context(method):
        methods.append(method)
        return original("fork")  # no TensorFlow runs in them

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
    tf.config.list_physical_devices()
    replica_check.start_processes().shutdown()
    monkeypatch.setattr(replica_check.context.context(), "_physical_devices", None)
    with replica_check.start_processes() as processes:
        pid, gpus = processes.submit(describe_process).result()
    assert methods == ["forkserver", "fork"]
    assert pid != os.getpid() and gpus == "-1"


def test_the_processes_have_ended_when_the_mode_has(monkeypatch, make_arguments):
    pool = mock.MagicMock()
    monkeypatch.setattr(replica_check, "start_processes", lambda: pool)
    monkeypatch.setattr(check.experiment, "build", mock.Mock(side_effect=UsageError("wrong")))
    with pytest.raises(UsageError, match="wrong"):
        check.check(make_arguments(flags={"quick": True, "checks": ""}))
    pool.__exit__.assert_called_once()


def outcome_of(*results):
    """The outcome of processes that return or raise something."""
    futures = [concurrent.futures.Future() for _ in results]
    for future, result in zip(futures, results, strict=True):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
    return replica_check._judge(futures, notes=False, left_out=())


def test_the_outcome_is_the_difference_of_either_batch_or_all_splits():
    even, uneven = (Report("T", "float64", (Split(n, 2),), {}) for n in (4, 5))
    outcome = outcome_of(even, uneven)
    assert (outcome.verdict, outcome.observation[:27]) == (PASS, "2 ways to split a batch, wi")
    difference = Difference("loss", "loss", Split(5, 2), 0, 2.0, 1.0)
    wrong = dataclasses.replace(uneven, differences=(difference,), cause="a mistake")
    assert outcome_of(even, wrong) == Outcome(FAIL, difference.brief(), "a mistake")
    assert outcome_of(even, "trainer.py:1: KeyError") == Outcome(FAIL, "trainer.py:1: KeyError")
    # A trainer may take even batches only.
    assert outcome_of(even, UsageError("ctl rejects every split")).verdict == PASS
    rejected = UsageError("ctl rejects every split: why")
    assert outcome_of(rejected, rejected) == Outcome(FAIL, "ctl rejects every split: why")
