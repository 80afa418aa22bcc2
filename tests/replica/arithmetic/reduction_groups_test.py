"""Gradients that are reduced in groups during the backward pass.

The strategies reduce over logical CPUs by the collectives that several processes use.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_util, cross_device_ops, cross_device_utils
import tf_keras

from ctl.replica.arithmetic import reduction
from tests.support import optimized_graph, reference_model

_GROUP_KEYS = itertools.count(1_000_000, 1000)  # other strategies of this process begin at 1
LAYERS, WIDTH = 4, 8


def make_strategy(replicas: int, bucket: int) -> tf.distribute.Strategy:
    """Replicas on logical CPUs that reduce in groups of `bucket` bytes; 0 for one group."""
    options = collective_util.Options(bytes_per_pack=bucket)
    devices = [f"/CPU:{i}" for i in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(
        devices,
        cross_device_ops=cross_device_ops.CollectiveAllReduce(
            devices, replicas, options, cross_device_utils.CollectiveKeys(next(_GROUP_KEYS))
        ),
    )
    # MirroredStrategy has no argument for them.
    strategy.extended._communication_options = options
    return strategy


@functools.cache
def backward_pass(bucket: int, shards: int):
    """A function that computes and reduces the gradients of a deep network on 2 replicas."""
    strategy = make_strategy(2, bucket)
    with strategy.scope():
        variables = [
            tf.Variable(np.random.default_rng(i).normal(size=[WIDTH, WIDTH])) for i in range(LAYERS)
        ]

    def replica_step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = tf.cast(replica + 1, tf.float64) * tf.ones([2, WIDTH], tf.float64)
        with tf.GradientTape() as tape:
            for i, variable in enumerate(variables):
                x = tf.tanh(tf.matmul(x, variable, name=f"layer{i}"))
            loss = tf.reduce_sum(x)
        gradients = tape.gradient(loss, variables)
        if shards:
            return reduction.sum_in_order([[*gradients, loss]], shards)
        gradients, loss = reduction.all_reduce(gradients, loss)
        return [*gradients, loss]

    def step():
        return [strategy.experimental_local_results(v) for v in strategy.run(replica_step)]

    return tf.function(step)


def collectives(nodes):
    """The names of the all-reduces of the first replica."""
    names = [n for n, node in nodes.items() if node.op.startswith("CollectiveReduce")]
    return [name for name in names if nodes[name].device.endswith("CPU:0")]


def layers_before(nodes, name):
    """The layers whose backward pass runs before a node."""
    before = optimized_graph.ancestors(nodes, name)
    return [i for i in range(LAYERS) if any(f"gradient_tape/layer{i}/" in n for n in before)]


@pytest.mark.parametrize("shards", [0, 2])
def test_group_depends_on_its_own_gradients_only(shards):
    matrix = max(1, shards) * WIDTH * WIDTH * 8
    nodes = optimized_graph.optimized_nodes(backward_pass(matrix, shards))
    layers = sorted(layers_before(nodes, name) for name in collectives(nodes))
    # The second group waits for the first, which is already sent, but not for the layers below.
    assert layers == [[0, 1, 2, 3], [1, 2, 3], [3]]


@pytest.mark.parametrize("shards", [0, 2])
def test_one_group_waits_for_the_backward_pass(shards):
    nodes = optimized_graph.optimized_nodes(backward_pass(0, shards))
    assert [layers_before(nodes, name) for name in collectives(nodes)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("shards", [0, 2])
def test_groups_of_two_replicas_have_the_sums_of_one_group_bit_for_bit(shards):
    for one, groups in zip(backward_pass(0, shards)(), backward_pass(1, shards)(), strict=True):
        for values in zip(one, groups, strict=True):  # of each replica
            assert values[0].numpy().tobytes() == values[1].numpy().tobytes()


def losses_and_weights(replicas: int, **options):
    """Trains the reference model; returns its losses, and the weights of each replica."""
    trainer = reference_model.make_trainer(
        make_strategy(replicas, 16) if replicas > 1 else None, 23,
        optimizer=lambda: tf_keras.optimizers.SGD(0.05), **options,
    )  # fmt: skip
    losses = [float(trainer.train(tf.constant(1))["loss"]) for _ in range(2)]
    losses.append(float(trainer.train(tf.constant(48))["loss"]))
    local = trainer.strategy.experimental_local_results
    weights = [[copy.numpy() for copy in local(v)] for v in trainer.model.trainable_variables]
    return losses, list(zip(*weights, strict=True))


# 23 rows on 4 replicas are uneven; the gradient of the embedding is sparse.
@pytest.mark.slow
def test_fifty_steps_in_groups_are_those_of_one_replica():
    losses, [expected] = losses_and_weights(1)
    grouped, replicas = losses_and_weights(4, micro_batches=2)
    np.testing.assert_allclose(grouped, losses, rtol=0, atol=1e-10)
    assert len(replicas) == 4
    for weights in replicas:
        for value, target in zip(weights, expected, strict=True):
            np.testing.assert_allclose(value, target, rtol=0, atol=1e-10)
