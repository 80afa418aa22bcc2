"""State that each replica assigns from its own rows is rejected, or named, however it is combined."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import running
from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split, build, difference

KINDS = tf.VariableAggregation
ON_READ = tf.VariableSynchronization.ON_READ


class RunningMean(Case):
    """A running mean of the outputs, from which the loss takes their distances."""

    aggregation, synchronization = KINDS.MEAN, tf.VariableSynchronization.AUTO
    is_read = True

    def build_model(self):
        zeros = tf.zeros([CLASSES], tf.float64)
        self.mean = tf.Variable(
            zeros,
            trainable=False,
            aggregation=self.aggregation,
            synchronization=self.synchronization,
        )
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs - self.mean if self.is_read else outputs)
        self.move(outputs)
        return losses

    def move(self, outputs):
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(outputs, axis=0))


class OfAllRows(RunningMean):
    def move(self, outputs):
        super().move(ctl.replica.all_gather(outputs))


class Counter(RunningMean):
    """The sum of what the replicas add is that of the global batch."""

    aggregation = KINDS.SUM

    def move(self, outputs):
        mask = ctl.replica.present()
        rows = tf.ones_like(outputs) if mask is None else tf.ones_like(outputs) * mask[:, None]
        self.mean.assign_add(tf.reduce_sum(rows, axis=0))


class CountsPadding(RunningMean):
    aggregation = KINDS.SUM

    def move(self, outputs):
        self.mean.assign_add(tf.reduce_sum(tf.ones_like(outputs), axis=0) + 0.0 * outputs[0])


class LargestRows(RunningMean):
    """The largest values of the replicas are summed."""

    aggregation = KINDS.SUM

    def move(self, outputs):
        self.mean.assign_add(tf.reduce_max(outputs, axis=0))


class PartsOfASum(RunningMean):
    """The replicas, but not the micro-batches, may count a step once each."""

    aggregation, synchronization = KINDS.SUM, ON_READ

    def move(self, outputs):
        self.mean.assign_add(tf.ones_like(self.mean))


class ByMetrics(RunningMean):
    """`update_metrics`, which micro-batches call after the losses, assigns what the next loss reads."""

    def per_example_loss(self, batch, outputs):
        return Case.per_example_loss(self, batch, outputs - self.mean)

    def update_metrics(self, metrics, batch, outputs, weights):
        self.move(outputs)


class SumsByMetrics(ByMetrics):
    aggregation, synchronization, move = KINDS.SUM, ON_READ, PartsOfASum.move


class StepsByMetrics(ByMetrics):
    aggregation = KINDS.ONLY_FIRST_REPLICA

    def move(self, outputs):
        self.mean.assign_add(tf.ones_like(self.mean))


class OfOneReplica(RunningMean):
    """All replicas assign the tensor that the last one has left."""

    def per_example_loss(self, batch, outputs):
        self.left = tf.reduce_mean(outputs, axis=0)
        return Case.per_example_loss(self, batch, outputs - self.mean)

    def replica_step(self, batch):
        loss = super().replica_step(batch)
        self.mean.assign(self.left)
        return loss


class MetricInLoss(Case):
    def build_metrics(self):
        return {"mean": tf_keras.metrics.Mean(dtype="float64")}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mean"].update_state(tf.reduce_sum(outputs**2, axis=1), weights)

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) * (1 + self.metrics["mean"].total)


def with_kind(**kind):
    return type("RunningMean", (RunningMean,), kind)


def train(case, split, caplog):
    build(case, split).train(tf.constant(1))
    return [line for line in caplog.messages if "a value of the rows of each replica" in line]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (RunningMean, "Variable:0"),
        (with_kind(aggregation=KINDS.SUM), "Variable:0"),
        (with_kind(aggregation=KINDS.ONLY_FIRST_REPLICA), "Variable:0"),
        (with_kind(aggregation=KINDS.ONLY_FIRST_REPLICA, synchronization=ON_READ), "Variable:0"),
        (LargestRows, "Variable:0"),
        (CountsPadding, "Variable:0"),
        (MetricInLoss, "total:0"),
    ],
)
def test_state_that_the_loss_reads_is_rejected_with_its_line(case, name, caplog):
    message = rf"^tests/checks/local_state_test\.py:\d+ assigns {name} a value of the rows of each"
    with pytest.raises(ctl.UsageError, match=message) as raised:
        train(case, Split(2), caplog)
    assert "\n" not in str(raised.value)


def test_tensor_of_one_replica_is_no_mean_of_equal_numbers_of_rows(caplog):
    with pytest.raises(ctl.UsageError, match="a value of the rows of each replica"):
        train(OfOneReplica, Split(2, 8), caplog)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (PartsOfASum, "adds to a sum that the loss"),
        (SumsByMetrics, "adds to a sum that the loss"),
        (ByMetrics, "assigns Variable:0 a value that depends on the rows"),
    ],
)
def test_state_that_the_loss_reads_is_that_of_a_step_and_not_of_a_micro_batch(case, words, caplog):
    with pytest.raises(
        ctl.UsageError, match=rf"^tests/.*:\d+ {words}.*set optimizer.micro_batches=1"
    ):
        train(case, Split(1, 8, micro_batches=2), caplog)


@pytest.mark.parametrize("case", [MetricInLoss, StepsByMetrics])
def test_state_that_update_metrics_assigns_is_right_with_micro_batches(case):
    reference, split = running.train(case, Split(1)), Split(1, micro_batches=2)
    assert difference(reference, running.train(case, split)) <= 1e-10


def test_state_that_the_loss_does_not_read_is_named(caplog):
    case = type("Unread", (RunningMean,), {"is_read": False})
    assert len(train(case, Split(2), caplog)) == 1


def test_mean_over_equal_numbers_of_rows_may_be_right(caplog):
    assert len(train(RunningMean, Split(2, 8), caplog)) == 1


@pytest.mark.parametrize("case", [OfAllRows, Counter])
def test_state_of_the_global_batch_is_accepted(case, caplog):
    assert not train(case, Split(2), caplog)
    assert difference(running.train(case, Split(1)), running.train(case, Split(2))) <= 1e-10
