"""TensorFlow's own TPUStrategy traces the same collectives, and refuses the same.

It is made without a TPU: of a resolver that says there are two cores, with the CPU's devices in their
place. It can trace a step; nothing can run it.
"""

import collections
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_system_metadata

import ctl
from ctl.modes.aot_compile import export, problems
from ctl.modes.aot_compile.strategy import SliceStrategy
from tests import tiny

BATCH, CORES = 8, 2
PLACE = "/job:localhost/replica:0/task:0/device:"


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Says that there are two cores."""

    environment, task_type, task_id = "", "worker", 0

    def __init__(self):
        pass

    def get_tpu_system_metadata(self):
        names = ["CPU:0", *(f"TPU:{i}" for i in range(CORES))]
        devices = [types.SimpleNamespace(name=PLACE + n, device_type=n[:3]) for n in names]
        return tpu_system_metadata.TPUSystemMetadata(CORES, 1, CORES, None, devices)

    def get_job_name(self):
        return "localhost"

    def master(self, *args, **kwargs):
        return ""

    get_master = master

    def cluster_spec(self):
        return tf.train.ClusterSpec({})


def real_strategy():
    strategy = tf.distribute.TPUStrategy(Resolver())
    strategy.extended._tpu_devices = np.array([[f"{PLACE}CPU:{i}"] for i in range(CORES)])
    strategy._enable_packed_variable_in_eager_mode = False
    return strategy


def collectives(strategy, **options):
    """How many collectives a train step has, by whether they are all-reduces."""
    trainer = tiny.trainer(strategy, BATCH, precision="float32", **options)
    shares = tiny.trainer(SliceStrategy(CORES), BATCH, precision="float32")
    element = shares.feed.training(BATCH, start=0).element_spec

    @tf.function
    def step(*tensors):
        trainer.train_step(iter([export._packed(element, tensors)]))

    specs = [spec for _, spec in export._flat(element)]
    graph = step.get_concrete_function(*specs).graph
    return collections.Counter(op.type for op in problems._operations(graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"loss_spike": 3.0}, {"norms": True}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_a_step_has_the_collectives_that_tpustrategy_traces(options):
    real = collectives(real_strategy(), **options)
    mine = collectives(SliceStrategy(CORES), **options)
    assert real["CrossReplicaSum"] > 0
    # The first replica's values travel by an exchange there, and by a sum with zeros here.
    assert mine["XlaAllReduce"] == real["CrossReplicaSum"] + real["AllToAll"]


def test_an_update_under_a_condition_of_all_replicas_is_refused_with_both():
    for strategy in (real_strategy(), SliceStrategy(CORES)):
        with pytest.raises(ctl.UsageError, match="TensorFlow refuses on a TPU: choose rollback"):
            collectives(strategy, on_non_finite="skip")
