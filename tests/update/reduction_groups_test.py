"""Gradients that are reduced in packs, during the backward pass.

The strategies reduce over logical CPUs by the collectives that several processes use.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_util, cross_device_ops, cross_device_utils
import tf_keras

from ctl.rows import packs
from ctl.update import reduction
from tests.support import optimized_graph, reference_model
from tests.support.checks import close

_GROUP_KEYS = itertools.count(1_000_000, 1000)  # other strategies of this process begin at 1
LAYERS, WIDTH = 4, 8


def make_strategy(replicas: int, bucket: int = 0) -> tf.distribute.Strategy:
    """Replicas on logical CPUs that reduce in packs of `bucket` bytes; 0 for those of ctl."""
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
def test_pack_depends_on_its_own_gradients_only(shards):
    matrix = max(1, shards) * WIDTH * WIDTH * 8
    nodes = optimized_graph.optimized_nodes(backward_pass(matrix, shards))
    layers = sorted(layers_before(nodes, name) for name in collectives(nodes))
    # The second pack waits for the first, which is already sent, but not for the layers below.
    assert layers == [[0, 1, 2, 3], [1, 2, 3], [3]]


@pytest.mark.parametrize("shards", [0, 2])
def test_one_pack_waits_for_the_backward_pass(shards):
    # Fewer gradients than a pack of ctl, which is also of 32 MiB if the strategy says nothing.
    nodes = optimized_graph.optimized_nodes(backward_pass(0, shards))
    assert [layers_before(nodes, name) for name in collectives(nodes)] == [[0, 1, 2, 3]]


def test_packs_are_the_default_and_a_tensor_of_unknown_shape_makes_none(monkeypatch):
    monkeypatch.setattr(packs, "BYTES", WIDTH * WIDTH * 8)
    nodes = optimized_graph.optimized_nodes(backward_pass.__wrapped__(0, 0))
    assert sorted(layers_before(nodes, name) for name in collectives(nodes)) == [
        [0, 1, 2, 3], [1, 2, 3], [3]
    ]  # fmt: skip
    sizes = [packs.options_for([tf.zeros([4]), x]).bytes_per_pack for x in unknown_and_sparse()]
    assert sizes == [0, packs.BYTES]


def test_buffers_are_those_of_the_largest_pack():
    sizes = [10, 20, 30, 40]  # 40 + 30 exceed a pack, and 20 + 10 are the next one
    mirrored = functools.partial(tf.distribute.MirroredStrategy, ["/CPU:0", "/CPU:1"])
    strategies = {
        "in packs": make_strategy(2, 45),
        "in packs of 5 bytes": make_strategy(2, 5),
        "all at once": mirrored(tf.distribute.HierarchicalCopyAllReduce()),
        "each by itself": mirrored(tf.distribute.ReductionToOneDevice()),
        "none": make_strategy(1),
    }
    found = {name: packs.buffer_bytes(each, sizes) for name, each in strategies.items()}
    assert found == {
        "in packs": 3 * 70, "in packs of 5 bytes": 3 * 40, "all at once": 3 * 100,
        "each by itself": 3 * 40, "none": 0,
    }  # fmt: skip


def unknown_and_sparse():
    """A tensor whose shape a graph does not know, and a sparse gradient, which is sent by itself."""
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, [None])
    return unknown, tf.IndexedSlices(tf.zeros([1, 2]), tf.zeros([1], tf.int32), tf.constant([3, 2]))


@pytest.mark.parametrize("shards", [0, 2])
def test_packs_of_two_replicas_have_the_sums_of_one_pack_bit_for_bit(shards):
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
def test_fifty_steps_in_packs_are_those_of_one_replica():
    losses, [expected] = losses_and_weights(1)
    grouped, replicas = losses_and_weights(4, micro_batches=2)
    np.testing.assert_allclose(grouped, losses, rtol=0, atol=1e-10)
    assert len(replicas) == 4
    for weights in replicas:
        close(weights, expected, 1e-10)
