"""Functions in real processes of their own."""

import json
import os
import time

import pytest

from ctl.errors import UsageError
from ctl.testing import run_workers


def place(extra):
    config = json.loads(os.environ["TF_CONFIG"])
    return (
        config["task"]["index"],
        len(config["cluster"]["worker"]),
        extra,
        os.environ.get("GREETING"),
    )


def add_up(value):
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    total = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(value))
    )
    return float(total)


def second_fails():
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    print(f"worker {index} is here", flush=True)
    if index == 1:
        raise RuntimeError("the disk is gone")
    time.sleep(60)


def refused():
    raise UsageError("Choose another batch.")


def sleep():
    time.sleep(60)


def test_each_worker_knows_its_place_and_returns_its_result():
    found = run_workers(place, "more", workers=3, environment={"GREETING": "hello"})
    assert found == [(i, 3, "more", "hello") for i in range(3)]


@pytest.mark.slow
def test_workers_reduce_over_the_processes():
    assert run_workers(add_up, 1.5, workers=2) == [3.0, 3.0]


def test_a_failure_shows_what_every_worker_said_and_ends_the_others():
    began = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_workers(second_fails, workers=2)
    assert "Process 1 ended with 1, and said:" in str(error.value)
    assert "RuntimeError: the disk is gone" in str(error.value)
    assert time.monotonic() - began < 50


def test_workers_that_do_not_end_are_ended():
    with pytest.raises(AssertionError, match="within 3 s"):
        run_workers(sleep, workers=1, timeout=3)


def test_a_mistake_told_in_a_worker_is_told_here():
    with pytest.raises(UsageError, match="another batch"):
        run_workers(refused, workers=1)


def test_what_does_not_pickle_is_told():
    with pytest.raises(UsageError, match="top level of a module"):
        run_workers(lambda: None)
