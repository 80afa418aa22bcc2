"""Penalties and gradients that are not sums over rows are rejected."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks.row_probe import Probe
from ctl.errors import LateUsageError
from tests.checks.traced_losses import (
    LABEL,
    QUERY,
    ROWS,
    attention,
    by_row,
    shifted_by_the_maximum,
    trace,
)
from tests.users_code import running
from tests.users_code.examples import Case
from tests.users_code.running import Split


def of_pairs(x):
    """Keras' example of PointNet: each matrix of a row meets those of the other rows."""
    x = tf.reshape(x, [-1, 2, 2])
    squares = tf.reshape(tf.tensordot(x, x, axes=(2, 2)), [-1, 2, 2])
    return tf.reduce_sum((squares - tf.eye(2, dtype=x.dtype)) ** 2)


class PenaltyOfPairs(Case):
    """An activity regularizer over pairs of rows, which are equal at first."""

    start, penalty = "zeros", staticmethod(of_pairs)

    def build_model(self):
        first = tf_keras.layers.Dense(
            4, kernel_initializer=self.start, bias_initializer=lambda shape, dtype: (
                tf.constant([1, 0, 0, 1], dtype)
            ), activity_regularizer=self.penalty,
        )  # fmt: skip
        return tf_keras.Sequential([first, tf_keras.layers.Dense(3)])


class PenaltyOfRows(PenaltyOfPairs):
    """The rows that are dropped are known by the number of the replica."""

    start, penalty = "glorot_uniform", tf_keras.regularizers.L2(0.1)

    def build_model(self):
        model = super().build_model()
        return tf_keras.Sequential([tf_keras.layers.Dropout(0.5), *model.layers])


def test_activity_regularizer_over_pairs_of_rows_is_rejected():
    with pytest.raises(LateUsageError, match=r"_test\.py:\d+ .* \(MatMul\).*in per_example_loss"):
        running.train(PenaltyOfPairs, Split(2, 8))
    other = type("", (PenaltyOfPairs,), {"start": "glorot_uniform"})
    with pytest.raises(ctl.UsageError, match=r"combines rows") as raised:
        running.train(other, Split(1, 8, 2))
    assert not isinstance(raised.value, LateUsageError)


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split(2, 8), Split(1, 8, 2), Split(4, 4)], ids=str)
def test_activity_regularizer_of_single_rows_computes_the_update_of_one_replica(split):
    expected = running.train(PenaltyOfRows, split.reference)
    assert running.difference(expected, running.train(PenaltyOfRows, split)) <= 1e-10


def straight_through(batch, keep=tf.stop_gradient):
    mean = tf.reduce_mean((batch["x"] @ QUERY) ** 2)
    return by_row(batch["x"] @ QUERY) + LABEL(batch) * (mean - keep(mean))


@tf.function
def stopped(x):
    return tf.stop_gradient(x)


@pytest.mark.parametrize("keep", [tf.stop_gradient, stopped])
def test_losses_are_rejected_whose_gradients_alone_depend_on_other_rows(keep):
    with pytest.raises(
        ctl.UsageError, match=r"_test\.py:\d+.* combines rows .*\(Mean\).* gradients"
    ):
        trace(lambda batch: straight_through(batch, keep))


def sorted_targets(batch):
    """Targets without a gradient, of rows that are sorted by their length and put back."""
    order = tf.argsort(batch["length"], stable=True)
    targets = tf.stop_gradient(tf.gather(batch["x"] @ QUERY, order))
    return by_row(batch["x"] @ QUERY - 2 * tf.gather(targets, tf.argsort(order)))


def stopped_mask(batch):
    targets = tf.stop_gradient(tf.boolean_mask(batch["series"] @ QUERY, batch["tokens"] > 0))
    values = tf.boolean_mask(batch["series"] @ QUERY, batch["tokens"] > 0)
    rows = tf.where(batch["tokens"] > 0)[:, 0]
    return tf.math.unsorted_segment_sum(by_row(targets - values**2), rows, ROWS)


@pytest.mark.parametrize("loss", [shifted_by_the_maximum, attention, sorted_targets, stopped_mask])
def test_gradients_of_independent_rows_are_accepted(loss, caplog, monkeypatch):
    found = []
    method = Probe.is_sum_of_rows
    monkeypatch.setattr(
        Probe,
        "is_sum_of_rows",
        lambda *args, **masks: found.append(method(*args, **masks)) or found[-1],
    )
    trace(loss)
    assert found == [True] and not caplog.text


@tf.custom_gradient
def scaled_by_the_sum(x):
    """A gradient that is divided by the sum over the rows."""
    return tf.identity(x), lambda upstream: upstream * x / tf.reduce_sum(tf.abs(x))


@tf.custom_gradient
def scaled_by_row(x):
    return tf.identity(x), lambda upstream: upstream * x / tf.norm(x, axis=1, keepdims=True)


def test_custom_gradients_that_combine_rows_are_rejected(caplog):
    with pytest.raises(ctl.UsageError, match=r"combines rows .*tf.custom_gradient"):
        trace(lambda batch: by_row(scaled_by_the_sum(batch["x"] @ QUERY)))
    trace(lambda batch: by_row(scaled_by_row(batch["x"] @ QUERY)))
    assert not caplog.text


@tf.custom_gradient
def scaled_by_place(x):
    return tf.identity(x), lambda d: d * tf.cast(tf.range(tf.shape(x)[0]) + 1, d.dtype)[:, None]


@tf.custom_gradient
def with_decay(x):
    return tf.identity(x), lambda d: d + 0.1 * x


@pytest.mark.parametrize(("function", "rows"), [(scaled_by_place, 8), (with_decay, 7)])
def test_custom_gradients_by_the_places_of_rows_or_of_padding_are_rejected(function, rows):
    class Scaled(Case):
        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, function(outputs))

    with pytest.raises(ctl.UsageError, match=r"as seen in the gradient of tf\.custom_gradient"):
        running.train(Scaled, Split(2, rows))


@tf.custom_gradient
def doubled(x):
    return tf.identity(x), lambda d: 2 * d


@pytest.mark.parametrize("split", [Split(2, 7), Split(2, 8, 2), Split(1, 8, 2)])
def test_custom_gradients_of_single_rows_are_accepted(split):
    class Doubled(Case):
        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, doubled(outputs))

    assert (
        running.difference(running.train(Doubled, split), running.train(Doubled, split.reference))
        <= 1e-10
    )
