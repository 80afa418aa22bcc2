"""Python code that gives each replica, or each micro-batch, another loss is rejected."""

import pytest
import tensorflow as tf

import ctl
from ctl.checks.loss_trace import compare_micro_batches
from ctl.graphs import order
from ctl.rows.trace import MicroBatchTrace, Trace, UpdateTrace
from tests.users_code.examples import Case
from tests.users_code.running import Split, difference, train
from tests.users_code.state import PythonCounter


class Doubled(Case):
    """Another op in every second trace."""

    traces = 0

    def per_example_loss(self, batch, outputs):
        self.traces += 1
        losses = super().per_example_loss(batch, outputs)
        return tf.exp(losses) if self.traces % 2 else losses


class InBranch(Case):
    """A counter in a branch of a conditional."""

    traces = 0

    def per_example_loss(self, batch, outputs):
        self.traces += 1
        factor = 1.0 / self.traces
        losses = super().per_example_loss(batch, outputs)
        return tf.cond(self.global_step < 100, lambda: factor * losses, lambda: losses)


class OwnPositions(Case):
    """Reads where the replica's rows are, which differs between replicas."""

    def per_example_loss(self, batch, outputs):
        context = tf.distribute.get_replica_context()
        count = outputs.shape[0]
        own = context.replica_id_in_sync_group * count + tf.range(count)
        return tf.cast(own >= 0, outputs.dtype) * super().per_example_loss(batch, outputs)


def own_number():
    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group if context else 0  # None while the model is built


class NumberInLoss(Case):
    def per_example_loss(self, batch, outputs):
        factor = 1 + tf.cast(own_number(), outputs.dtype)
        return factor * super().per_example_loss(batch, outputs)


class NumberInWeight(Case):
    def sample_weight(self, batch, training=True):
        return 1.0 + tf.cast(own_number() + 0 * batch["label"], tf.float64)


class NumberInPython(Case):
    def per_example_loss(self, batch, outputs):
        number = tf.get_static_value(own_number()) or 0
        losses = super().per_example_loss(batch, outputs)
        return losses * tf.cast(tf.constant(number), losses.dtype)


class NumberInPreprocess(Case):
    def preprocess(self, batch):
        return {**batch, "x": batch["x"] + tf.cast(own_number(), batch["x"].dtype)}


class NumberInPenalty(Case):
    def regularization_losses(self):
        kernel = self.model.layers[0].kernel
        return [tf.cast(own_number(), kernel.dtype) * tf.reduce_sum(kernel**2)]


def test_number_of_the_replica_in_a_penalty_is_rejected():
    with pytest.raises(ctl.UsageError, match=r"regularization_losses .*replica"):
        train(NumberInPenalty, Split(2, 8))


class GatheredByTensorFlow(Case):
    """The place of a row among the gathered rows, which the user computes."""

    places = True

    def per_example_loss(self, batch, outputs):
        context, count = tf.distribute.get_replica_context(), tf.shape(outputs)[0]
        rows = context.all_gather(outputs, axis=0)
        places = (own_number() * count if self.places else 0) + tf.range(count)
        scores = outputs @ tf.transpose(rows)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(places, scores)


class RanksOfGathered(Case):
    """The rank of each label among those of all rows, some of which are equal."""

    def per_example_loss(self, batch, outputs):
        count = tf.shape(outputs)[0]
        labels = tf.distribute.get_replica_context().all_gather(batch["label"], axis=0)
        ranks = tf.argsort(tf.argsort(labels, stable=True), stable=True)
        first = own_number() * count
        weights = tf.cast(ranks[first : first + count], outputs.dtype)
        return super().per_example_loss(batch, outputs) * weights


class FirstGathered(GatheredByTensorFlow):
    places = False


@pytest.mark.parametrize("case", [NumberInLoss, NumberInWeight, NumberInPython, NumberInPreprocess])
def test_number_of_the_replica_is_rejected_with_its_line(case):
    with pytest.raises(ctl.UsageError) as raised:
        train(case, Split(2, 8))
    message = str(raised.value)
    assert message.startswith("tests/") and "\n" not in message
    assert "uses the number of the replica" in message and "ctl.replica.positions" in message


@pytest.mark.parametrize("case", [GatheredByTensorFlow, RanksOfGathered])
@pytest.mark.parametrize("replicas", [2, 4])
def test_positions_of_the_user_among_rows_that_tensorflow_gathers_are_accepted(case, replicas):
    expected = train(case, Split(1, 8))
    assert difference(expected, train(case, Split(replicas, 8))) <= 1e-10


def test_places_of_the_first_rows_that_tensorflow_gathers_are_rejected():
    with pytest.raises(ctl.UsageError, match=r"uses the place .*ctl\.replica\.positions"):
        train(FirstGathered, Split(2, 8))


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (PythonCounter, Split(2)),
        (PythonCounter, Split(1, micro_batches=2)),
        (Doubled, Split(2)),
        (InBranch, Split(1, micro_batches=2)),
    ],
)
def test_state_of_python_is_rejected_with_its_line(case, split):
    with pytest.raises(ctl.UsageError) as raised:
        train(case, split)
    message = str(raised.value)
    assert message.startswith("tests/") and "self.global_step" in message
    assert ("replicas" if split.replicas > 1 else "micro-batches") in message


def test_positions_and_numbers_of_the_rows_may_differ():
    unequal = Split(2, 5, micro_batches=2)  # micro-batches of 1 and 2 rows, then of 1 and 1
    expected = train(OwnPositions, unequal.reference)
    assert difference(expected, train(OwnPositions, unequal)) <= 1e-10


def test_the_barrier_between_compiled_micro_batches_is_no_difference():
    differences = []

    def step(x, number):
        first = MicroBatchTrace([x], tf.zeros([]), 4, [x + number])  # a dropout mask reads the step
        with order.run_after([first.losses], (x, number), compiled=True) as (y, later):
            second = MicroBatchTrace([y], tf.zeros([]), 4, [y + later])
        trace = Trace([x], [UpdateTrace([x], micro_batches=[first, second])])
        differences.append(compare_micro_batches(trace))

    tf.function(step).get_concrete_function(tf.ones([4]), tf.ones([]))
    assert differences == [None]
