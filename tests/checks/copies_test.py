"""Variables that a step assigns differently on each replica are rejected after the first inner loop."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks.copies import check_copies
from tests.users_code import gathered, running, state
from tests.users_code.examples import Case
from tests.users_code.running import Split


def train(case, split):
    return running.build(case, split).train(tf.constant(1))


@pytest.mark.parametrize("case", [state.CenterLoss, state.MeanAggregatedStatisticCase])
def test_value_of_the_rows_of_one_replica_is_rejected(case):
    with pytest.raises(ctl.UsageError, match=r"assigns .* ctl\.replica\.all_gather\("):
        train(case, Split(2))


def test_value_that_is_the_same_on_all_replicas_is_accepted():
    train(gathered.CenterLoss, Split(2))


def test_one_replica_computes_from_all_rows():
    train(state.CenterLoss, Split(1))


@pytest.mark.parametrize(
    "dtype, accepted, rejected", [("float64", 1e-11, 1e-8), ("float32", 1e-6, 1e-3)]
)
def test_copies_may_differ_by_rounding(dtype, accepted, rejected):
    strategy = ctl.testing.make_strategy(2)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], dtype=dtype, trainable=False)
    second = variable.values[1]
    second.assign(tf.constant([1.0, 2.0 + accepted], dtype))
    check_copies({"bank": [variable]})
    second.assign(tf.constant([1.0, 2.0 + rejected], dtype))
    with pytest.raises(ctl.UsageError, match="copies of bank differ"):
        check_copies({"bank": [variable]})


def test_optimizer_that_counts_in_python_is_named():
    class Counting(tf_keras.optimizers.SGD):
        count = 0

        def update_step(self, gradient, variable):
            self.count += 1
            variable.assign_sub(gradient / self.count)

    trainer = Case(
        global_batch_size=4, strategy=running.strategy(2), optimizer=lambda: Counting(1.0)
    )
    message = "differ: the optimizer, or the step, computes"
    with pytest.raises(ctl.UsageError, match=message) as error:
        trainer.train(tf.constant(1))
    assert "rows" not in str(error.value)


def test_parts_of_a_sum_are_not_compared():
    with ctl.testing.make_strategy(2).scope():
        metric = tf_keras.metrics.Mean()
    metric.variables[0].values[1].assign(3.0)
    check_copies({"total": metric.variables[0]})
