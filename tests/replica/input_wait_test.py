"""The time that steps wait for their batches, with pipelines and steps that sleep for known times."""

import itertools
import os
import time

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep
from tensorflow.python.framework import config

from ctl import testing
from ctl.data import distribution
from ctl.replica import flops
from ctl.replica.engine import engine_of
from ctl.replica.input_wait import InputWait
from tests import child, reference_model

STEPS = 12


def make_strategy(name):
    return tf.distribute.get_strategy() if name == "default" else testing.make_strategy(name)


def measure_share(strategy, *, pipeline, step, steps=STEPS):
    """The share of the time that a loop waits whose pipeline and step sleep for so many seconds."""

    def make_dataset(context):
        # A thread of tf.data sleeps, and none of those that the replicas share.
        dataset = tf.data.Dataset.range(steps + 4).batch(1)
        return dataset.apply(sleep(int(1e6 * pipeline))).prefetch(1)

    wait = InputWait(strategy)
    wait.enable()
    iterator = iter(distribution.from_function(strategy, make_dataset))

    @tf.function
    def run(count):
        for _ in tf.range(count):
            element = wait.next(iterator)
            first = strategy.experimental_local_results(element)[0]
            tf.numpy_function(lambda _: (time.sleep(step), 0)[1], [first], tf.int64)

    run(tf.constant(2))
    wait.reset()
    begin = time.perf_counter()
    run(tf.constant(steps))
    return wait.read() / (time.perf_counter() - begin)


@pytest.mark.parametrize("strategy", ["default", 1, 2, 4])
@pytest.mark.parametrize(
    ("pipeline", "step", "share"), [(0.06, 0.03, 0.5), (0.01, 0.06, 0.0), (0.04, 0.0, 1.0)]
)
def test_share_is_that_of_the_times_of_pipeline_and_step(strategy, pipeline, step, share):
    measured = measure_share(make_strategy(strategy), pipeline=pipeline, step=step)
    assert measured == pytest.approx(share, abs=0.08)


# One core has one thread for operations: the second reading must not wait for the step's.
ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import time
import tensorflow as tf
from ctl.replica.input_wait import InputWait

wait = InputWait(tf.distribute.get_strategy())
wait.enable()
iterator = iter(tf.data.Dataset.from_tensors(tf.ones([64, 512])).repeat().prefetch(2))
weights = tf.ones([512, 512]) / 512

@tf.function
def run(count):
    for _ in tf.range(count):
        values = wait.next(iterator)
        for _ in range(40):
            values = tf.tanh(values @ weights)
        tf.debugging.assert_all_finite(values, "")

run(tf.constant(2))
wait.reset()
begin = time.perf_counter()
run(tf.constant(50))
print(wait.read() / (time.perf_counter() - begin))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are selected on Linux")
def test_computing_on_one_core_is_no_wait(tmp_path):
    program = tmp_path / "program.py"  # AutoGraph requires a file
    program.write_text(ON_ONE_CORE)
    result = child.run([str(program)])
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.4  # 0.9 if the reading waits for the step


def test_deterministic_steps_read_no_clock():
    tf.config.experimental.enable_op_determinism()
    try:
        wait = InputWait(tf.distribute.get_strategy())
        wait.enable()
        iterator = iter(tf.data.Dataset.range(3))
        assert tf.function(lambda: wait.next(iterator))().numpy() == 0
        assert wait.read() is None
    finally:
        config.disable_op_determinism()


def test_eager_steps_are_measured():
    wait = InputWait(tf.distribute.get_strategy())
    wait.enable()
    assert wait.read() is None  # no step has read a batch
    iterator = iter(tf.data.Dataset.range(3).apply(sleep(50_000)))
    assert [int(wait.next(iterator)) for _ in range(3)] == [0, 1, 2]
    assert wait.read() == pytest.approx(0.15, abs=0.05)
    wait.reset()
    assert wait.read() == 0.0


def count_clocks(trainer):
    """The readings of the clock in the last trace of a trainer's loop."""
    trainer.train(tf.constant(2))
    graph = flops.list_graphs(trainer)[-1].as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return sum(node.op == "Timestamp" for node in [*graph.node, *nodes])


@pytest.mark.parametrize("replicas", [1, 2])
def test_step_has_no_clock_until_the_measurement_is_enabled(replicas):
    trainer = reference_model.make_trainer(testing.make_strategy(replicas), 8)
    assert count_clocks(trainer) == 0
    engine_of(trainer).results.measure_waiting()
    assert count_clocks(trainer) == 2


@pytest.mark.parametrize("replicas", [2, 4])
def test_uneven_batches_keep_their_masks_and_the_bits_of_the_update(replicas):
    plain, measured = (
        reference_model.make_trainer(testing.make_strategy(replicas), 7) for _ in range(2)
    )
    engine_of(measured).results.measure_waiting()
    for trainer in (plain, measured):
        trainer.train(tf.constant(5))
    for a, b in zip(plain.model.variables, measured.model.variables, strict=True):
        for x, y in itertools.zip_longest(*map(plain.strategy.experimental_local_results, (a, b))):
            assert (x.numpy() == y.numpy()).all()


def test_compiled_loop_measures_its_chunks():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, xla="loop")
    engine_of(trainer).results.measure_waiting()
    trainer.train(tf.constant(3))
    assert engine_of(trainer).results.input_wait.read() > 0.0


def test_own_step_that_never_calls_ctls_is_not_measured():
    class OwnStep(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            next(iterator)
            self.global_step.assign_add(1)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=OwnStep)
    engine_of(trainer).results.measure_waiting()
    trainer.train(tf.constant(3))
    assert engine_of(trainer).results.input_wait.read() is None
