"""The time that steps wait for their batches and for reductions, by clocks of the test."""

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep
from tensorflow.python.framework import config

from ctl import testing
from ctl.built import flops
from ctl.built.inner_loop import loop_of
from ctl.data import distribution
from ctl.rows.waits import InputWait, ReductionWait, observe
from tests.support import optimized_graph, reference_model

STEPS = 4


@pytest.fixture
def events(monkeypatch):
    """What happens in a loop, in its order; the clock's n-th reading, from 0 on, is n^2."""
    events = []

    def read():
        events.append("clock")
        return np.float64((events.count("clock") - 1) ** 2)

    monkeypatch.setattr(tf, "timestamp", lambda: tf.numpy_function(read, [], tf.float64))
    return events


# The readings of step k are 4 k^2 and (2 k + 1)^2.
SECONDS = sum(4 * k + 1 for k in range(STEPS))


def log(events, event):
    """Returns an identity function that logs an event when it runs."""
    return lambda x: tf.numpy_function(lambda x: (events.append(event), x)[1], [x], tf.int64)


@pytest.mark.parametrize("replicas", ["default", 2])
def test_each_step_measures_from_its_request_to_the_arrival_of_its_batch(events, replicas):
    strategy = (
        tf.distribute.get_strategy() if replicas == "default" else testing.make_strategy(replicas)
    )

    def make_dataset(context):
        dataset = tf.data.Dataset.range(2 * STEPS).batch(1).apply(sleep(20_000))
        return dataset.map(log(events, "batch"))

    wait = InputWait(strategy)
    wait.enable()
    iterator = iter(distribution.from_function(strategy, make_dataset))

    @tf.function
    def run(count):
        for _ in tf.range(count):
            log(events, "step")(strategy.experimental_local_results(wait.next(iterator))[0])

    run(tf.constant(STEPS))
    assert wait.read() == SECONDS
    if replicas == "default":
        assert events == ["clock", "batch", "clock", "step"] * STEPS
    else:  # tf.distribute reads batches ahead
        assert [e for e in events if e != "batch"] == ["clock", "clock", "step"] * STEPS
        for step, end in enumerate([i for i, e in enumerate(events) if e == "clock"][1::2], 1):
            assert events[:end].count("batch") >= step * replicas
    wait.reset()
    assert wait.read() == 0.0


def test_no_operation_of_a_step_runs_before_the_second_reading():
    """One core has one thread for operations: the reading would wait for the step's."""
    wait = InputWait(tf.distribute.get_strategy())
    wait.enable()
    iterator = iter(tf.data.Dataset.range(3))
    graph = tf.function(lambda: wait.next(iterator)).get_concrete_function().graph
    nodes = {node.name: node for node in graph.as_graph_def().node}
    before = optimized_graph.ancestors(nodes, graph.outputs[0].op.name)
    assert sum(nodes[name].op == "Timestamp" for name in before) == 2


def test_deterministic_steps_read_no_clock():
    tf.config.experimental.enable_op_determinism()
    try:
        wait = InputWait(tf.distribute.get_strategy())
        wait.enable()
        iterator = iter(tf.data.Dataset.range(3))
        assert tf.function(lambda: wait.next(iterator))().numpy() == 0
        assert wait.read() is None
        reductions = make_wait(testing.make_strategy(1))
        with reductions.active():
            tf.function(lambda: observe(tf.constant(1.0), tf.constant(1.0)))()
        assert reductions.read() is None
    finally:
        config.disable_op_determinism()


def test_eager_steps_are_measured(events):
    wait = InputWait(tf.distribute.get_strategy())
    wait.enable()
    assert wait.read() is None  # no step has read a batch
    iterator = iter(tf.data.Dataset.range(STEPS))
    assert [int(wait.next(iterator)) for _ in range(STEPS)] == [*range(STEPS)]
    assert wait.read() == SECONDS


def count_clocks(trainer):
    """The readings of the clock in the last trace of a trainer's loop."""
    trainer.train(tf.constant(2))
    graph = flops.list_graphs(trainer)[-1].as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return sum(node.op == "Timestamp" for node in [*graph.node, *nodes])


def test_step_has_no_clock_until_the_measurement_is_enabled():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    assert count_clocks(trainer) == 0
    loop_of(trainer).step.results.measure_waiting()
    assert count_clocks(trainer) == 2  # at the input, and not at the reductions of one process
    loop = trainer._train_loop_fn
    loop_of(trainer).step.results.measure_waiting()  # as a second controller does
    trainer.train(tf.constant(1))
    assert trainer._train_loop_fn is loop  # it is not traced again


class OwnStep(reference_model.ReferenceTrainer):
    """Never calls the step of ctl, so nothing is measured."""

    def train_step(self, iterator):
        next(iterator)
        self.global_step.assign_add(1)


@pytest.mark.parametrize(
    ("options", "measured"), [({"xla": "loop"}, True), ({"cls": OwnStep}, False)]
)
def test_compiled_loop_measures_its_chunks_and_an_own_step_nothing(options, measured):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, **options)
    results = loop_of(trainer).step.results
    results.measure_waiting()
    trainer.train(tf.constant(3))
    wait = results.input_wait.read()
    assert wait > 0.0 if measured else wait is None


# Reductions.


def make_wait(strategy):
    """A measurement as that of several processes."""
    wait = ReductionWait(strategy)
    wait._is_supported = True
    wait.enable()
    return wait


def test_wait_is_that_of_the_replica_that_waits_the_least(monkeypatch):
    replicas = 2
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
        seconds = clocks[replica]  # before `answer` may change it
        started[replica].set()
        return seconds

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


@pytest.mark.slow
def test_measurement_changes_no_bit_of_the_update_of_uneven_batches():
    plain = reference_model.make_trainer(testing.make_strategy(2), 7)
    measured = reference_model.make_trainer(plain.strategy, 7)
    results = loop_of(measured).step.results
    results.reduction_wait = make_wait(plain.strategy)
    results.measure_waiting()
    # Two readings at the input, and two on each of two replicas, at the sum of the gradients and not at
    # the sum of the weights.
    assert [count_clocks(trainer) for trainer in (plain, measured)] == [0, 6]
    for trainer in (plain, measured):
        trainer.train(tf.constant(3))
    assert results.reduction_wait.read() > 0 and results.input_wait.read() > 0
    for a, b in zip(plain.model.variables, measured.model.variables, strict=True):
        for x, y in itertools.zip_longest(*map(plain.strategy.experimental_local_results, (a, b))):
            assert (x.numpy() == y.numpy()).all()
