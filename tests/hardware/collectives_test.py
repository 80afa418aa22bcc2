"""The processes of a run make the same decisions."""

import os
import pathlib
import time

import pytest
import tensorflow as tf

from ctl import testing
from ctl.hardware import cluster, engines, selection
from ctl.hardware.collectives import ProcessGroup
from ctl.hardware.selection import Hardware
from ctl.hardware.strategies import StrategyOptions

LARGEST = 2**53 - 1  # the largest integer below which float64 is exact


def check_answers(processes):
    assert processes.any_process(True) is True
    assert processes.any_process(False) is False
    assert processes.broadcast_from_chief(LARGEST) == LARGEST
    assert processes.broadcast_from_chief(-3) == -3
    assert processes.maximum(-0.3) == -0.3
    assert processes.gather([0.5, -3.0]) == [[0.5, -3.0]]
    processes.barrier()


def test_a_process_that_decides_alone_answers_without_a_collective(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "_gather_from_replicas", lambda *_: pytest.fail("ran one"))
    check_answers(ProcessGroup())
    check_answers(ProcessGroup(selection.build("mirrored", StrategyOptions(logical_devices=2))))
    chief = cluster.make_local_clusters(workers=2, servers=1, ports=[1, 2, 3, 4])[0]
    strategy = tf.distribute.get_strategy()
    check_answers(ProcessGroup(Hardware(strategy, "parameter_server", "a test", chief)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_collective_gives_every_replica_the_same_answer(replicas):
    """A group of one process, made to run the collectives that several processes would."""
    hardware = selection.build("mirrored", StrategyOptions(logical_devices=replicas))
    processes = ProcessGroup(hardware)
    processes.is_single = False
    check_answers(processes)


def answer_all(folder):
    """Calls every method with a different value in each process, and returns the answers."""
    options = StrategyOptions(cluster=engines.from_environment(os.environ))
    hardware = selection.build("multi_worker_mirrored", options)
    processes, index = ProcessGroup(hardware), hardware.cluster.index
    answers = [
        processes.any_process(False),
        processes.any_process(index == 0),
        processes.any_process(index == 1),
        processes.any_process(True),
        processes.broadcast_from_chief(LARGEST - index),
        processes.broadcast_from_chief(-5 + index),
        processes.broadcast_from_chief(0 if index == 0 else 9),
        processes.maximum(-0.5 + 0.25 * index),
        processes.maximum(0.25 - index),
        processes.gather([index + 0.5, -1.0]),
        processes.broadcast_json_from_chief([index, "é" * index]),
        processes.members,
    ]
    if index == 1:
        time.sleep(0.5)  # so that a barrier that does not wait would return before the file exists
        (pathlib.Path(folder) / "arrived").touch()
    processes.barrier()
    answers.append((pathlib.Path(folder) / "arrived").exists())
    return answers


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    answers = [False, True, True, True, LARGEST, -5, 0, -0.25, 0.25]
    answers += [[[0.5, -1.0], [1.5, -1.0]], [0, ""]]
    answers += [[("worker 0", "localhost"), ("worker 1", "localhost")]]
    assert testing.run_workers(answer_all, str(tmp_path)) == [[*answers, True]] * 2
