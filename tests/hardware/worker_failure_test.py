"""The error of a broken collective becomes one line that names the lost process."""

import pytest
import tensorflow as tf

from ctl.errors import LostWorker
from ctl.hardware import cluster
from ctl.hardware.worker_failure import report_lost_worker

CHIEF = cluster.make_local_clusters(workers=3, servers=0, ports=[1, 2, 3])[0]


def raise_in_block(error, processes=CHIEF):
    with report_lost_worker(processes):
        raise error


UNAVAILABLE = tf.errors.UnavailableError
HEARTBEAT = "Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"


@pytest.mark.parametrize(
    ("cls", "message", "names"),
    [
        (UNAVAILABLE, "failed to connect to /job:worker/replica:0/task:1: x", "worker 1"),
        (tf.errors.AbortedError, "/job:worker/task:1", "worker 1"),
        (tf.errors.CancelledError, "/job:worker/task:1", "worker 1"),
        (tf.errors.DeadlineExceededError, "/job:worker/task:1", "worker 1"),
        (UNAVAILABLE, "/job:worker/task:2 and /job:worker/task:1 are out", "worker 1, worker 2"),
        (UNAVAILABLE, "/job:worker/replica:0/task:0/device:CPU:0: timed out", "another process"),
        (UNAVAILABLE, "connection reset by peer", "another process"),
        # Heartbeats go to the first process, which is this one.
        (UNAVAILABLE, HEARTBEAT, "another process"),
        # Later collectives fail for the same reason.
        (tf.errors.InternalError, "Collective ops is aborted by: x", "another process"),
    ],
)
def test_lost_processes_are_named(cls, message, names):
    with pytest.raises(LostWorker) as error:
        raise_in_block(cls(None, None, message))
    assert str(error.value) == (
        f"worker 0 stops, because {names} has ended or cannot be reached: check it and the network, "
        "then start all processes again to continue from the last checkpoint."
    )


def test_process_whose_heartbeats_fail_names_the_first_one():
    worker = cluster.make_local_clusters(workers=3, servers=0, ports=[1, 2, 3])[1]
    error = tf.errors.DeadlineExceededError(None, None, HEARTBEAT)
    with pytest.raises(LostWorker, match="worker 1 stops, because worker 0 has ended or cannot be"):
        raise_in_block(error, worker)


@pytest.mark.parametrize(
    ("error", "processes"),
    [
        (tf.errors.UnavailableError(None, None, "x"), None),
        (tf.errors.InvalidArgumentError(None, None, "x"), CHIEF),
        (ValueError("x"), CHIEF),
    ],
    ids=["run of one process", "error of an operation", "error of Python"],
)
def test_other_errors_are_not_changed(error, processes):
    with pytest.raises(type(error)):
        raise_in_block(error, processes)
