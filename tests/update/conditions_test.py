"""A step of `ctl.Step` under a condition is no step where the condition is False."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

X = np.random.default_rng(0).normal(size=(20, 3))
DATA = {"x": X, "label": X[:, :1]}


def build():
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [layers.Dense(2, input_shape=[3]), ctl.SyncBatchNormalization(), layers.Dense(1)]
    )


def make(replicas, size=5, **options):
    strategy = testing.make_strategy(replicas)
    with strategy.scope():
        error = tf_keras.metrics.MeanSquaredError(dtype="float64")
    return ctl.Step(
        build,
        lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        lambda batch, outputs: (outputs[:, 0] - batch["x"][:, 0]) ** 2,
        global_batch_size=size,
        strategy=strategy,
        precision="float64",
        metrics={"error": error},
        ema_decay=0.9,
        **options,
    )


def distribute(step):
    dataset = tf.data.Dataset.from_tensor_slices(DATA).batch(step.global_batch_size)
    return step.strategy.experimental_distribute_dataset(dataset)


def state_of(step):
    kept = [*step.model.weights, *step.optimizer.variables, *step.built().parts[0].averages]
    results = step.results()
    values = [*(v.numpy().ravel() for v in kept), [results["loss"]], [results["error"]]]
    return np.concatenate([np.asarray(value, np.float64) for value in values])


def train(step, is_due):
    """In a function of the user, in which no conditional may contain a step."""

    @tf.function
    def run(batches):
        for batch in batches:
            step(batch, when=is_due(step.global_step))

    step.build(next(iter(distribute(step))))
    run(distribute(step))


@pytest.mark.parametrize(
    ("replicas", "size", "options"),
    [(1, 5, {}), (2, 5, {"on_non_finite": "ignore"}), (4, 4, {})],
)
def test_a_step_under_a_condition_is_that_of_a_conditional_of_python(replicas, size, options):
    expected = make(1, size)
    for number, batch in enumerate(distribute(expected)):
        if number % 2 == 0:
            expected(batch)
    kept = state_of(expected)
    in_function, called = (make(replicas, size, **options) for _ in range(2))
    train(in_function, lambda step: step % 2 == 0)
    applied = [
        bool(called(batch, when=number % 2 == 0).applied)
        for number, batch in enumerate(distribute(called))
    ]
    assert applied == [number % 2 == 0 for number in range(20 // size)]
    for step in (in_function, called):
        assert step.optimizer.iterations == sum(applied) and step.skipped_steps == 0
        np.testing.assert_allclose(state_of(step), kept, rtol=0, atol=1e-12)


def test_replicas_that_disagree_in_ones_own_strategy_run_are_an_error():
    step = make(2)

    @tf.function
    def run(batch):
        has_first = lambda rows: tf.reduce_any(rows["x"] == X[0])  # noqa: E731
        step.strategy.run(lambda rows: step(rows, when=has_first(rows)).loss, args=(batch,))

    tf_keras.backend.set_floatx("float64")
    try:
        batch = next(iter(distribute(step)))
        step.build(batch)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"when is True on \W*1\W* of 2 replicas"
        ):
            run(batch)
    finally:
        tf_keras.backend.set_floatx("float32")


def test_a_value_for_each_replica_is_an_error():
    step = make(2)
    batch = next(iter(distribute(step)))
    step.build(batch)
    values = step.strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
    with pytest.raises(ctl.UsageError, match="when has a value for each replica"):
        tf.function(lambda: step(batch, when=values))()
