"""What one replica with all rows computes otherwise is rejected, as long as it is split."""

import dataclasses

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.users_code.examples import Case
from tests.users_code.running import Split, difference, train


def all_reduce(reduction, value):
    return tf.distribute.get_replica_context().all_reduce(reduction, value)


def all_gather(value):
    return tf.distribute.get_replica_context().all_gather(value, axis=0)


def present(outputs):
    """Returns [rows, 1], 1 for the rows that exist."""
    mask = ctl.replica.present()
    exists = tf.ones_like(outputs[:, :1])
    return exists if mask is None else exists * tf.cast(mask, outputs.dtype)[:, None]


def mean_of_maxima(outputs):
    return all_reduce("MEAN", tf.reduce_max(outputs, axis=0))


def mean_of_means(outputs):
    """Is right for even batches."""
    return all_reduce("MEAN", tf.reduce_mean(outputs, axis=0))


def centred_rows(outputs):
    rows = ctl.replica.all_gather(outputs - tf.reduce_mean(outputs, axis=0))
    return tf.reduce_mean(rows**2, axis=0)


def padding(outputs):
    return tf.reduce_mean(all_gather(outputs), axis=0)


def mean_by_sums(outputs):
    exists = present(outputs)
    total, count = all_reduce(
        "SUM", [tf.reduce_sum(outputs * exists, axis=0), tf.reduce_sum(exists)]
    )
    return total / count


def largest_of_largest(outputs):
    local = tf.reduce_max(tf.where(present(outputs) > 0, outputs, -1e9), axis=0, keepdims=True)
    return tf.reduce_max(all_gather(local), axis=0)


def next_row(outputs):
    """Pairs rows by their positions, so that a row with another position has another partner."""
    rows = tf.roll(ctl.replica.all_gather(outputs), 1, axis=0)
    return tf.gather(rows, ctl.replica.positions(outputs))


def next_row_and_largest(outputs):
    return next_row(outputs) + largest_of_largest(outputs)


def next_row_and_centred(outputs):
    return next_row(outputs) + centred_rows(outputs)


def count_of_all(outputs):
    return all_reduce("SUM", tf.cast(tf.shape(outputs)[0], outputs.dtype)) / len(outputs)


def collecting(collect):
    class Collecting(Case):
        def per_example_loss(self, batch, outputs):
            losses = super().per_example_loss(batch, outputs)
            # A random number that is keyed by the position of a row in the global batch.
            noise = ctl.random.uniform([None], dtype=losses.dtype)
            return losses * (1 + noise) + tf.reduce_mean((outputs - collect(outputs)) ** 2, axis=1)

    return Collecting


@pytest.mark.parametrize(
    "collect, rows",
    [
        *((mean_of_maxima, 8), (mean_of_means, 7), (next_row_and_centred, 8), (padding, 7)),
        (count_of_all, 8),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_collective_of_what_a_replica_has_combined_is_rejected_with_its_line(collect, rows):
    with pytest.raises(
        ctl.UsageError, match=r"(collect|one replica).*ctl\.replica\.all_gather"
    ) as raised:
        train(collecting(collect), Split(2, rows))
    assert "\n" not in str(raised.value) and "_test.py:" in str(raised.value)


@pytest.mark.parametrize(
    "collect, rows",
    [(mean_by_sums, 7), (next_row_and_largest, 7), (mean_of_means, 8)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_collective_whose_result_is_a_function_of_the_global_batch_is_right(collect, rows, caplog):
    case = collecting(collect)
    assert difference(train(case, Split(1, rows)), train(case, Split(2, rows))) <= 1e-10
    assert not caplog.records


def test_collective_of_a_micro_batch_is_rejected():
    with pytest.raises(ctl.UsageError, match="before a collective"):
        train(collecting(mean_by_sums), Split(1, 8, micro_batches=2))


def test_rows_that_a_micro_batch_gathers_are_rejected():
    """There are no other rows in a micro-batch, although all replicas have one."""
    with pytest.raises(ctl.UsageError, match="before a collective"):
        train(collecting(padding), Split(1, 8, micro_batches=2))


class OwnPositions(Case):
    """Pairs rows as in the documentation of tf.distribute: right if replicas have equally many rows."""

    def per_example_loss(self, batch, outputs):
        count = tf.shape(outputs)[0]
        first = tf.distribute.get_replica_context().replica_id_in_sync_group * count
        rows = tf.cast(first + tf.range(count), outputs.dtype)
        return super().per_example_loss(batch, outputs) * (1 + rows)


class CountingGradient(Case):
    """A gradient that is multiplied by the number of rows of a replica or micro-batch."""

    def per_example_loss(self, batch, outputs):
        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda dy: dy * tf.cast(tf.shape(x)[0], dy.dtype)

        return super().per_example_loss(batch, scaled(outputs))


def test_positions_from_the_number_of_the_replica_are_right_for_equally_many_rows(caplog):
    split = Split(2, 8)
    assert difference(train(OwnPositions, split.reference), train(OwnPositions, split)) <= 1e-10
    assert not caplog.records


@pytest.mark.parametrize("split", [Split(2, 8), Split(1, 8, micro_batches=2)], ids=str)
@pytest.mark.parametrize("case", [OwnPositions, CountingGradient])
def test_number_of_rows_or_of_the_replica_that_changes_the_update_is_rejected(case, split):
    if case is OwnPositions:
        split = dataclasses.replace(split, micro_batches=2)
    with pytest.raises(ctl.UsageError, match=r"number of the replica|tf\.custom_gradient"):
        train(case, split)


class Divided(Case):
    """A step as it is written for tf.distribute, which divides the losses by a number of its own."""

    number = staticmethod(lambda trainer, losses: 1)

    def replica_step(self, batch):
        def losses(batch):
            losses = self.per_example_loss(batch, self.model(batch["x"], training=True))
            return losses / self.number(self, losses)

        return self.minimize(batch, losses)


class ByReplicas(Divided):
    number = staticmethod(lambda trainer, losses: trainer.strategy.num_replicas_in_sync)


class ByRows(Divided):
    number = staticmethod(lambda trainer, losses: losses.shape[0])


@pytest.mark.parametrize(
    ("case", "split"),
    [(ByReplicas, Split(2, 8)), (ByRows, Split(2, 7)), (ByRows, Split(1, 8, micro_batches=2))],
    ids=str,
)
def test_own_step_that_divides_by_a_number_of_the_split_is_rejected(case, split):
    with pytest.raises(ctl.UsageError, match=r"replica_step \(.*one replica.*leave out numbers"):
        train(case, split)


def test_own_step_that_leaves_the_division_to_ctl_is_right(caplog):
    split = Split(2, 7)
    assert difference(train(Divided, split.reference), train(Divided, split)) <= 1e-10
    assert not caplog.records


class ByHand(Case):
    """Trains the model by `minimize`, and a weight of the losses with an optimizer of its own."""

    total = staticmethod(tf.reduce_mean)

    def build_model(self):
        self.weight = tf.Variable(1.0, dtype=tf.float64)
        self.second = tf_keras.optimizers.SGD(0.1, momentum=0.5)
        return super().build_model()

    def replica_step(self, batch):
        def losses(batch):
            outputs = self.model(batch["x"], training=True)
            return self.per_example_loss(batch, outputs) * tf.stop_gradient(self.weight)

        loss = self.minimize(batch, losses, variables=self.model.trainable_variables)
        with tf.GradientTape() as tape:
            total = self.weight * self.total(self.model(batch["x"]) ** 2)
        self.second.apply_gradients([(tape.gradient(total, self.weight), self.weight)])
        return loss


class SumByHand(ByHand):
    def total(self, values):
        return tf.reduce_sum(values) / self.global_batch_size


def test_update_beside_minimize_is_compared():
    split = Split(2, 8)
    assert difference(train(SumByHand, split.reference), train(SumByHand, split)) <= 1e-10
    line = r"_test\.py:\d+ updates Variable:0 otherwise than one replica.*call self\.minimize"
    with pytest.raises(ctl.UsageError, match=line):
        train(ByHand, split)


class Noise(Case):
    """Draws the same numbers for the rows of each replica."""

    shape = staticmethod(tf.shape)

    def forward(self, batch, training):
        outputs = self.model(batch["x"], training=training)
        noise = ctl.random.normal(self.shape(outputs), shared=True, dtype=tf.float64)
        return outputs + noise


class NoiseOfColumns(Noise):
    def shape(self, outputs):
        return [outputs.shape[1]]


@pytest.mark.parametrize("split", [Split(2, 7), Split(1, 6, micro_batches=2)], ids=str)
def test_shared_numbers_for_rows_are_rejected(split):
    found = train(NoiseOfColumns, split.reference), train(NoiseOfColumns, split)
    assert difference(*found) <= 1e-10, "also for as many columns as rows"
    with pytest.raises(ctl.UsageError, match=r"_test\.py:\d+ draws .* leave out shared=True"):
        train(Noise, split)


class Center(Case):
    """Keeps a mean of the outputs, which the losses of later steps read."""

    collect = staticmethod(mean_of_means)

    def build_model(self):
        kind = tf.VariableAggregation.MEAN
        self.center = tf.Variable(tf.zeros(3, tf.float64), trainable=False, aggregation=kind)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        losses += tf.reduce_mean((outputs - self.center) ** 2, axis=1)
        self.center.assign(0.9 * self.center + 0.1 * self.collect(tf.stop_gradient(outputs)))
        return losses


class CenterOfRows(Center):
    collect = staticmethod(mean_by_sums)


def test_what_the_step_assigns_is_compared_if_losses_read_it():
    split = Split(2, 7)
    assert difference(train(CenterOfRows, split.reference), train(CenterOfRows, split)) <= 1e-10
    with pytest.raises(ctl.UsageError, match="before a collective"):
        train(Center, split)


class CountedRows(Center):
    """Adds the rows of a replica, and not those of the global batch."""

    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs) / (1 + self.center[0])
        self.center.assign_add(tf.fill([3], tf.cast(tf.shape(outputs)[0], tf.float64)))
        return losses


@pytest.mark.parametrize("split", [Split(2, 8), Split(1, 8, micro_batches=2)], ids=str)
def test_number_of_rows_that_the_step_adds_to_a_variable_is_rejected_with_its_line(split):
    with pytest.raises(
        ctl.UsageError, match=r"_test\.py:\d+ assigns .*, which updates read"
    ) as raised:
        train(CountedRows, split)
    assert "\n" not in str(raised.value)


class ThroughAnother(Center):
    """Copies a mean of means into the variable that the losses read."""

    def build_model(self):
        self.mean = tf.Variable(tf.zeros(3, tf.float64), trainable=False)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs - self.center)
        self.mean.assign(mean_of_means(tf.stop_gradient(outputs)))
        self.center.assign(self.mean)
        return losses


class OfWeights(Center):
    """The weights of the losses read it."""

    def sample_weight(self, batch):
        return tf.ones_like(batch["x"][:, 0]) + self.center[0] ** 2

    def per_example_loss(self, batch, outputs):
        self.center.assign(mean_of_means(tf.stop_gradient(outputs)))
        return Case.per_example_loss(self, batch, outputs)


class Slice(Center):
    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs - self.center)
        self.center[0].assign(mean_of_means(tf.stop_gradient(outputs))[0])
        return losses


class Condition(Case):
    """Applies an update if the largest outputs of the replicas are large on average."""

    def replica_step(self, batch):
        largest = mean_of_maxima(self.model(batch["x"]))

        def losses(batch):
            return self.per_example_loss(batch, self.model(batch["x"], training=True))

        return self.minimize(batch, losses, when=tf.reduce_sum(largest) > 0.3)


class Rate(Center):
    """The optimizer reads it."""

    def per_example_loss(self, batch, outputs):
        mean = mean_of_means(tf.stop_gradient(outputs))
        self.optimizer.learning_rate.assign(0.1 + tf.abs(mean[0]))
        return Case.per_example_loss(self, batch, outputs)


class Outer(Case):
    """The trainer does not hold it."""

    def build_model(self):
        variable = tf.Variable(tf.zeros(3, tf.float64), trainable=False)
        self.center = lambda: variable
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs - self.center())
        self.center().assign(tf.reduce_mean(tf.stop_gradient(outputs), axis=0))
        return losses


@pytest.mark.parametrize("case", [ThroughAnother, OfWeights, Rate, Slice, Condition, Outer])
def test_what_an_update_reads_other_than_in_its_losses_is_compared(case):
    with pytest.raises(ctl.UsageError, match=r"before a collective|which updates read"):
        train(case, Split(2, 7))
