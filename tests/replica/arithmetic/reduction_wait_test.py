"""The time that contributions wait for the result of a reduction."""

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from ctl import testing
from ctl.replica.arithmetic.reduction_wait import ReductionWait, observe
from ctl.replica.step import flops
from ctl.replica.step.engine import engine_of
from tests import reference_model


def make_wait(strategy):
    """A measurement as that of several processes."""
    wait = ReductionWait(strategy)
    wait._is_supported = True
    wait.enable()
    return wait


@pytest.mark.parametrize("replicas", [1, 2])
def test_wait_is_that_of_the_replica_that_waits_the_least(monkeypatch, replicas):
    strategy = testing.make_strategy(replicas)
    wait = make_wait(strategy)
    # Like a collective, taking from a queue blocks no thread.
    queues = [tf.queue.FIFOQueue(2, tf.float32, shapes=[[]]) for _ in range(replicas)]

    @tf.function
    def run():
        def reduce():
            value = tf.constant(1.0) + tf.cast(tf.random.uniform([]) > 2, tf.float32)
            result = tf.switch_case(
                tf.distribute.get_replica_context().replica_id_in_sync_group,
                [queue.dequeue for queue in queues],
            )
            observe(value, result)

        strategy.run(reduce)

    clocks = np.zeros(replicas)  # of each replica
    started = [threading.Event() for _ in range(replicas)]

    def read_clock(replica, _):
        started[replica].set()
        return clocks[replica]

    def clock():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # Like a timestamp, it neither waits for the operations before nor is a constant.
        inputs = [replica, tf.random.uniform([])]
        return tf.ensure_shape(
            tf.numpy_function(read_clock, inputs, tf.float64, stateful=False), []
        )

    def answer():
        for event in started:
            event.wait(60)
        clocks[:] = np.arange(3.0, 3.0 + replicas)
        for queue in queues:
            queue.enqueue(1.0)

    monkeypatch.setattr(tf, "timestamp", clock)
    with wait.active():
        for queue in queues:
            queue.enqueue(1.0)
        run()
        wait.reset()
        for event in started:
            event.clear()
        thread = threading.Thread(target=answer)
        thread.start()
        run()
        thread.join()
    assert wait.read() == 3.0  # the first replica's; the second waits for 4
    wait.reset()
    assert wait.read() == 0.0


def test_reductions_outside_of_the_block_and_eager_ones_are_not_measured():
    wait = make_wait(testing.make_strategy(1))
    observe(tf.constant(1.0), tf.constant(1.0))
    with wait.active():
        observe(tf.constant(1.0), tf.constant(1.0))
    assert wait.read() is None


def test_deterministic_steps_read_no_clock():
    tf.config.experimental.enable_op_determinism()
    try:
        assert make_wait(testing.make_strategy(1)).read() is None
    finally:
        config.disable_op_determinism()


def count_clocks(trainer):
    trainer.train(tf.constant(2))
    graph = flops.list_graphs(trainer)[-1].as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return sum(node.op == "Timestamp" for node in [*graph.node, *nodes])


def test_one_process_has_no_clock_at_its_reductions():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    engine_of(trainer).step.results.reduction_wait.enable()
    assert count_clocks(trainer) == 0


def test_measurement_changes_no_bit_of_the_update():
    plain = reference_model.make_trainer(testing.make_strategy(2), 7)
    measured = reference_model.make_trainer(plain.strategy, 7)
    engine_of(measured).step.results.reduction_wait = make_wait(plain.strategy)
    # Two readings on each of two replicas, at the sum of the gradients and not at that of the weights.
    assert count_clocks(measured) == 4
    plain.train(tf.constant(2))
    for trainer in (plain, measured):
        trainer.train(tf.constant(5))
    assert engine_of(measured).step.results.reduction_wait.read() > 0
    for a, b in zip(plain.model.variables, measured.model.variables, strict=True):
        for x, y in itertools.zip_longest(*map(plain.strategy.experimental_local_results, (a, b))):
            assert (x.numpy() == y.numpy()).all()
