"""Everything that a step reports is compared, or rejected in one line."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from benchmarks.comparisons import tutorials
from ctl.errors import UsageError
from ctl.testing import Loop, check_loop_equivalence
from ctl.testing.diagnosis import causes
from ctl.testing.splits import Split
from ctl.testing.subjects.loop import LoopRun, LoopSubject

X = np.random.default_rng(0).normal(size=(8, 3))


def build_with(report, metrics=()):
    """Returns a `build` of a tiny loop whose step returns `report(strategy, losses)`.

    Args:
        report: makes the result of the step from the per-replica losses.
        metrics: name of each metric, which is updated with 1, 2, ... on the replica.
    """

    def build(strategy, global_batch_size):
        with strategy.scope():
            weights = tf.Variable(tf.ones([3], tf_keras.backend.floatx()), name="weights")
            means = [tf_keras.metrics.Mean(name) for name in metrics]

        def replica_step(batch):
            context = tf.distribute.get_replica_context()
            gradient = context.all_reduce("SUM", tf.reduce_sum(batch, 0)) / global_batch_size
            weights.assign_sub(0.1 * gradient)
            for number, mean in enumerate(means, 1):
                mean.update_state(float(number))
            return tf.reduce_sum(batch) / global_batch_size

        @tf.function
        def step(batch):
            return report(strategy, strategy.run(replica_step, args=(batch,)))

        return Loop(step, [weights, *means])

    return build


def check(build, examples, *sizes, steps):
    options = dict(replicas=(2,), batch_sizes=sizes, steps=steps, in_process=True)
    return check_loop_equivalence(build, examples, **options)


def sum_up(strategy, losses):
    return strategy.reduce("SUM", losses, axis=None)


def test_metrics_with_the_same_name_are_numbered():
    run = LoopRun(LoopSubject(build_with(sum_up, ("mean", "mean", "loss")), X, 1), Split(4))
    values = run.read_results(run.train(range(4)))
    metrics = [("metric", name) for name in ("mean", "mean#2", "loss")]
    assert list(values) == [("loss", "loss"), *metrics]
    assert [float(v) for v in values.values()][1:] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (lambda _, losses: {"loss": losses}, r"returns one value per replica .*strategy\.reduce"),
        (lambda s, losses: (sum_up(s, losses), 1.0), "returns a tuple, but must return the loss"),
        (lambda s, losses: "loss", "returns a .*Tensor, but must return the loss"),
    ],
    ids=["per_replica", "tuple", "text"],
)
def test_result_of_a_step_that_is_no_number_is_an_error(report, message):
    with pytest.raises(UsageError, match=message):
        check(build_with(report), X, 4, steps=1)


def test_variable_may_be_the_result_of_a_step():
    def build(strategy, global_batch_size):
        loop = build_with(sum_up)(strategy, global_batch_size)
        with strategy.scope():
            total = tf.Variable(0.0, trainable=False)

        def step(batch):
            total.assign(tf.cast(loop.step(batch), tf.float32))
            return total

        return Loop(step, [*loop.variables, total])

    run = LoopRun(LoopSubject(build, X, 1), Split(4, 2))
    values = run.read_results(run.train(range(4)))
    np.testing.assert_allclose(values["loss", "loss"], X[:4].sum() / 4, rtol=1e-6)


ROWS, LABEL = tutorials.examples()
AVERAGED = causes.OWN_ROWS.format(how="averaged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "examples", "sizes"),
    [
        pytest.param(tutorials.orbit_example, {"x": ROWS, "label": LABEL}, (5,), id="orbit"),
        pytest.param(tutorials.fit(tf_keras), (ROWS, LABEL), (4, 5), id="tf_keras"),
        pytest.param(tutorials.fit(keras), (ROWS, LABEL), (5,), id="keras_3"),
    ],
)
def test_uneven_batches_reveal_a_mean_of_means(build, examples, sizes):
    report = check(build, examples, *sizes, steps=2)
    assert report.precision == "float64"
    assert {str(d.split) for d in report.differences} == {"2 replicas (3 + 2 rows)"}
    assert report.cause == AVERAGED
