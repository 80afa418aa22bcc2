"""Losses and penalties that contain the number of replicas are rejected, and no others."""

import functools
import inspect

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks import one_replica
from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split, difference, train

FILE = r"tests/checks/replica_count_test\.py"


class Divided(Case):
    """Divides as a loop does that sums the gradients of the replicas."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return losses / tf.cast(self.strategy.num_replicas_in_sync, losses.dtype)


class DividedByRows(Case):
    def per_example_loss(self, batch, outputs):
        rows = self.global_batch_size // tf.distribute.get_strategy().num_replicas_in_sync
        return super().per_example_loss(batch, outputs) / rows


class Stored(Case):
    """Reads the number in its constructor."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = self.global_batch_size / self.strategy.num_replicas_in_sync

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) / self.rows


class ScaledPenalty(Case):
    def regularization_losses(self):
        kernel = self.model.layers[0].kernel
        return [tf.nn.scale_regularization_loss(tf.reduce_sum(kernel**2))]


class DividedGathered(Case):
    """The collective of ctl returns the rows of all replicas, whatever their number."""

    def per_example_loss(self, batch, outputs):
        centre = tf.reduce_mean(ctl.replica.all_gather(outputs), axis=0)
        distances = tf.reduce_sum((outputs - centre) ** 2, axis=1)
        return distances / self.strategy.num_replicas_in_sync


class Weighted(Case):
    def sample_weight(self, batch, training):
        weights = tf.ones_like(batch["label"], self.dtype) + tf.cast(batch["label"], self.dtype)
        return weights + self.strategy.num_replicas_in_sync

    dtype = tf.float64


class WeightedByMean(Weighted):
    """Divides the mean of the global batch by it, as `Mean` does."""

    def sample_weight(self, batch, training):
        labels = 1 + tf.cast(batch["label"], self.dtype)
        mean = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_mean(labels))
        return labels + mean / self.strategy.num_replicas_in_sync


class Mean(Case):
    """Divides a sum over the replicas by their number."""

    def per_example_loss(self, batch, outputs):
        context, losses = (
            tf.distribute.get_replica_context(),
            super().per_example_loss(batch, outputs),
        )
        mean = context.all_reduce("SUM", tf.reduce_mean(tf.cast(batch["label"], losses.dtype)))
        return losses * mean / self.strategy.num_replicas_in_sync


class Branch(Case):
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return losses * 1.0 if self.strategy.num_replicas_in_sync > 1 else losses


@pytest.mark.parametrize("case", [Divided, DividedByRows, DividedGathered, Stored])
def test_the_number_of_replicas_in_a_loss_is_rejected_with_its_line(case):
    with pytest.raises(ctl.UsageError, match=r" is .* on each replica, and .* on one") as raised:
        train(case, Split(2, 8))
    assert "\n" not in str(raised.value) and "_test.py:" in str(raised.value)


@pytest.mark.parametrize("case", [Weighted, ScaledPenalty])
def test_the_number_of_replicas_in_a_weight_or_a_penalty_is_rejected(case):
    with pytest.raises(
        ctl.UsageError, match=rf"{FILE}:\d+ uses the number of replicas in the update"
    ):
        train(case, Split(2, 8))


class FixedRows(Divided):
    """Cannot be traced for the rows of all replicas."""

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, tf.ensure_shape(outputs, [4, None]))


def test_the_number_of_replicas_is_rejected_where_all_rows_cannot_be_computed_at_once():
    with pytest.raises(
        ctl.UsageError, match=rf"{FILE}:\d+ uses the number of replicas in the update"
    ):
        train(FixedRows, Split(2, 8))


@pytest.fixture
def many(monkeypatch):
    """As if there were more replicas than are computed at once."""
    monkeypatch.setattr(one_replica, "_MOST_REPLICAS", 1)
    train.cache_clear()
    yield
    train.cache_clear()


@pytest.mark.parametrize("case", [Divided, DividedByRows, Stored, Weighted, ScaledPenalty])
def test_the_number_of_many_replicas_is_rejected(case, many):
    with pytest.raises(ctl.UsageError, match="uses the number of replicas in the update"):
        train(case, Split(2, 8))


@pytest.mark.parametrize(
    "case, line", [(Branch, ""), (Case, ""), (Mean, "all replicas have summed")]
)
def test_many_replicas_cause_a_line_only_where_the_number_may_divide_a_sum(
    case, line, many, caplog
):
    train(case, Split(2, 8))
    assert line in caplog.messages[-1] if line else not caplog.messages


class Named(Case):
    def scale(self):
        return self.strategy.num_replicas_in_sync


def test_code_that_no_step_runs_causes_no_comparison(monkeypatch):
    monkeypatch.setattr(one_replica, "check", lambda *arguments: compared.append(arguments))
    compared = []
    train(Named, Split(2, 8))
    assert not any(suspects or counted for *_, suspects, counted in compared)


@pytest.mark.parametrize("case", [Mean, WeightedByMean, Branch])
def test_means_over_replicas_and_branches_are_right(case):
    assert difference(train(case, Split(1, 8)), train(case, Split(2, 8))) <= 1e-10


class Shares(Case):
    """Keeps the number in a form that a comparison cannot change."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shares = {"loss": tf.constant(1 / self.strategy.num_replicas_in_sync, tf.float64)}

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) * self.shares["loss"]


class DividedRegularizer(Case):
    def build_model(self):
        penalty = tf_keras.regularizers.L2(1.0 / self.strategy.num_replicas_in_sync)
        return tf_keras.Sequential([tf_keras.layers.Dense(CLASSES, kernel_regularizer=penalty)])


class ScaledRate(Case):
    def build_optimizer(self, optimizer):
        return tf_keras.optimizers.SGD(0.1 * self.strategy.num_replicas_in_sync)


class Cached(Case):
    @functools.cached_property
    def share(self):
        return 1.0 / self.strategy.num_replicas_in_sync

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) * self.share


@pytest.mark.parametrize("case", [Shares, DividedRegularizer, ScaledRate, Cached])
def test_the_number_of_replicas_that_was_kept_before_the_step_is_named(case, caplog):
    train(case, Split(2, 8))
    source, first = inspect.getsourcelines(case)
    line = first + next(i for i, each in enumerate(source) if "num_replicas_in_sync" in each)
    assert any(f"test.py:{line} uses num_replicas_in_sync before" in x for x in caplog.messages)
