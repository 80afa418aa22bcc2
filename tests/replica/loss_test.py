"""The denominator of the loss, which is that of the global batch."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.replica import loss


def on_replicas(strategy, function, *per_replica):
    """Runs `function` on each replica; each of `per_replica` is one argument, a value per replica."""
    values = [
        strategy.experimental_distribute_values_from_function(
            lambda context, v=v: tf.constant(v[context.replica_id_in_sync_group])
        )
        for v in per_replica
    ]
    result = tf.function(lambda *args: strategy.run(function, args=args))(*values)
    return [r.numpy() for r in strategy.experimental_local_results(result)]


def test_three_examples_on_two_replicas_by_hand():
    # Losses 1, 2 | 6 with weights 1, 1 | 1: the mean of all is 3, the mean of means 3.75.
    def share(per_example, present):
        weights = loss.row_weights(None, present, tf.float64)
        return loss.contribution(
            per_example, weights, loss.global_weight(weights, 2, 3, tf.float64)
        )

    shares = on_replicas(
        testing.make_strategy(2),
        share,
        [np.array([1.0, 2.0]), np.array([6.0, 6.0])],
        [[1.0, 1.0], [1.0, 0.0]],
    )
    assert shares == pytest.approx([1.0, 2.0], abs=1e-15)


def test_weights_count_across_replicas_by_hand():
    # Weights 1, 3 | 4 and losses 8, 0 | 2: (8 + 0 + 8) / 8.
    def share(per_example, weight):
        weights = loss.row_weights(weight, None, tf.float64)
        return loss.contribution(
            per_example, weights, loss.global_weight(weights, 1, 2, tf.float64)
        )

    shares = on_replicas(
        testing.make_strategy(2),
        share,
        [np.array([8.0, 0.0]), np.array([2.0, 0.0])],
        [[1.0, 3.0], [4.0, 0.0]],
    )
    assert shares == [1.0, 1.0]


def test_full_static_batch_divides_by_a_constant():
    def is_constant(_):
        total = loss.global_weight(None, 4, 8, tf.float64)
        assert tf.get_static_value(total) == 8.0
        return total

    assert on_replicas(testing.make_strategy(2), is_constant, [1.0, 1.0]) == [8.0, 8.0]


def test_batch_that_is_not_full_is_counted():
    assert on_replicas(
        testing.make_strategy(2),
        lambda rows: loss.global_weight(None, tf.cast(rows, tf.int32), 8, tf.float64),
        [3.0, 2.0],
    ) == [5.0, 5.0]


@pytest.mark.parametrize("weight", [[0.0, 0.0], None])
def test_total_weight_of_zero_gives_no_loss_and_no_gradient(weight):
    x = tf.Variable([2.0, 3.0])
    with tf.GradientTape() as tape:
        weights = loss.row_weights(
            None if weight is None else tf.constant(weight), tf.zeros([2]), tf.float32
        )
        value = loss.contribution(tf.square(x), weights, tf.reduce_sum(weights))
    assert value.numpy() == 0.0
    assert tape.gradient(value, x).numpy().tolist() == [0.0, 0.0]


def test_row_of_weight_zero_is_not_a_row_of_padding():
    weights = loss.row_weights(tf.constant([2.0, 0.0]), tf.constant([1.0, 1.0]), tf.float32)
    assert weights.numpy().tolist() == [2.0, 0.0]
    assert loss.row_weights(None, None, tf.float32) is None


def test_contributions_of_regularization_sum_to_it_once():
    parts = [
        loss.regularization_contribution([tf.constant(3.0), tf.constant(5.0)], 4, tf.float64)
    ] * 4
    assert sum(part.numpy() for part in parts) == 8.0
    assert loss.regularization_contribution([], 4, tf.float64) is None


@pytest.mark.parametrize("shape", [[], [2, 3]])
def test_losses_that_are_not_one_per_example_are_rejected(shape):
    with pytest.raises(ctl.UsageError, match="one loss per example"):
        loss.contribution(tf.zeros(shape), None, tf.constant(1.0))


def test_regularization_of_examples_is_rejected():
    with pytest.raises(ctl.UsageError, match="per_example_loss"):
        loss.regularization_contribution([tf.zeros([3])], 1, tf.float32)


def test_weights_of_another_shape_are_rejected():
    with pytest.raises(ctl.UsageError, match=r"must be \[rows\]"):
        loss.row_weights(tf.ones([3, 1]), None, tf.float32)
