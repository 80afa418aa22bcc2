"""Each planted mistake is found, and its cause is reported."""

import re

import pytest
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.keras import precision
from ctl.testing.diagnosis import causes
from ctl.testing.subjects import noise
from tests.testing import gallery, loop_gallery, mistakes

# An even batch has fewer causes to tell apart.
SIZES = [pytest.param((8,), marks=[pytest.mark.slow, pytest.mark.long]), (5,)]


def check(mistake, *sizes, **arguments):
    # A step rejects some mistakes before their numbers can be compared.
    options = TrainerOptions(allow_unkeyed_random=mistake.unkeyed, allow_row_coupling=True)
    report = gallery.check(mistake.trainer, *sizes, options=options, **arguments)
    check_first_line(report, mistake.name, mistake.where, mistake.cause)


def check_first_line(report, name, where, cause):
    # Without the numbers that Keras appends to the names of layers.
    line = re.sub(r"(dense|batch_norm\w*?)_\d+\b", r"\1", report.failure().splitlines()[0])
    assert line.startswith(name)
    assert where in line
    assert cause in line


# The mistakes whose rules are tested by a trainer, and by a loop. The others are in the long tests: the
# same as a trainer or loop, or as in advice_test.py, or a factor of the rows that update_rules_test.py
# recognizes.
TRAINERS = {
    "AuxiliaryNotReduced", "CountAveraged", "LossOverLocalBatch", "NoiseInEvaluation",
    "PaddedSyncBatchNorm", "SameMask", "SecondModelReducedTwice",
}  # fmt: skip
LOOPS = {"CountedByEach", "MetricAveraged", "MetricGrows", "NotUnscaled", "PlainBatchNorm"}


def each(all_mistakes, default, slow):
    """All mistakes, of which one is in the default tests, and some are in the slow tests."""
    marks = {name: [pytest.mark.slow] for name in slow} | {default: []}
    long = [pytest.mark.slow, pytest.mark.long]
    return [pytest.param(m, marks=marks.get(m.name, long), id=m.name) for m in all_mistakes]


@pytest.mark.parametrize("mistake", each(mistakes.OF_TRAINERS, "OneReplicaOnly", TRAINERS))
def test_planted_mistake_of_a_trainer_is_named(mistake):
    splits = dict(replicas=mistake.replicas, accumulation=mistake.accumulation)
    check(mistake, *mistake.batch_sizes, **splits)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mistake", mistakes.OF_TRAINERS, ids=lambda m: m.name)
def test_planted_mistake_is_named_by_the_default_comparison(mistake):
    check(mistake, accumulation=(1, 2))


@pytest.mark.parametrize("mistake", each(mistakes.OF_LOOPS, "MeanOfMeans", LOOPS))
def test_planted_mistake_of_a_loop_is_named(mistake):
    sizes = mistake.batch_sizes if mistake.name == "MeanOfMeans" else (8, 5)
    report = loop_gallery.check(mistake.loop, *sizes, replicas=mistake.replicas)
    where, cause = mistake.loop_where or mistake.where, mistake.loop_cause or mistake.cause
    check_first_line(report, mistake.name, where, cause)


class DependsOnReplicas(gallery.ByHand):
    """Adds a constant that depends on the number of replicas, which no rule recognizes."""

    def apply_summed(self, gradients, variables):
        constant = 0.01 * self.strategy.num_replicas_in_sync**3
        super().apply_summed([g + constant for g in gradients], variables)


@pytest.mark.slow
def test_unknown_mistake_is_reported_without_a_cause():
    report = gallery.check(DependsOnReplicas, 8, replicas=(2,), steps=1)
    assert report.cause == causes.UNKNOWN
    assert report.differences[0].kind == "update"


class ClippedByValue(loop_gallery.Plain):
    """Clips some elements of what each replica computes, so that no norm is the same in each step."""

    def apply(self, gradients, variables):
        super().apply([tf.clip_by_value(g, -0.05, 0.05) for g in gradients], variables)


class DecayedTwiceSummed(mistakes.ReducedTwice, loop_gallery.ByHand):
    """Sums the gradients twice, and adds a decay that is larger than tiny gradients."""

    def apply_summed(self, gradients, variables):
        share = 0.5 / self.strategy.num_replicas_in_sync
        decayed = [g + share * v for g, v in zip(gradients, variables, strict=True)]
        super().apply_summed(decayed, variables)


class ClippedBesideDecay(mistakes.ClippedBeforeReduction, loop_gallery.ByHand):
    """Adds a decay once, which is larger than tiny gradients."""

    def apply_summed(self, gradients, variables):
        decayed = [g + 0.5 * v for g, v in zip(gradients, variables, strict=True)]
        super().apply_summed(decayed, variables)


class ClippedInFloat32(mistakes.ClippedBeforeReduction, loop_gallery.ByHand):
    """Computes in float32, whatever the default dtype is."""

    def __init__(self, strategy, global_batch_size):
        with precision.floatx_scope("float32"):
            super().__init__(strategy, global_batch_size)

    def forward(self, batch, training):
        return super().forward({"x": tf.cast(batch["x"], tf.float32)}, training)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loop", [ClippedBesideDecay, ClippedInFloat32])
def test_clip_is_named_beside_a_decay_and_in_float32(loop, sizes):
    assert loop_gallery.check(loop, *sizes, steps=1).cause == causes.CLIPPED


@pytest.mark.slow
def test_clip_before_the_sum_is_named_and_no_other_mistake_beside_a_decay_is():
    assert loop_gallery.check(ClippedByValue, 8, 5, steps=1).cause == causes.CLIPPED
    other = loop_gallery.check(DecayedTwiceSummed, 8, 5, steps=1)
    assert other.verdict == "differs" and other.cause != causes.CLIPPED


class SecondModelIsFirst(loop_gallery.TwoModels):
    """Updates the second model first; the mistake is there, and the first model follows from it."""

    summed = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        with self.strategy.scope():
            hidden = tf_keras.layers.Dense(4, activation="tanh", input_shape=(4,))
            self.second = tf_keras.Sequential([hidden, tf_keras.layers.Dense(1)])

    def forward(self, batch, training):
        return super().forward(batch, training) * (1 + self.second(batch["x"]))

    def replica_step(self, batch):
        variables = self.second.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.square(self.second(batch["x"])[:, 0])
            total = tf.reduce_sum(losses)
            own = tf.math.divide_no_nan(total, tf.cast(tf.size(losses), total.dtype))
            share = total / self.global_batch_size if self.summed else own
        gradients = tape.gradient(share, variables)
        if self.summed:
            gradients = gallery.all_reduce(gallery.SUM, gradients)
        self.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loop_gallery.Plain.replica_step(self, batch)


class MeansOfSecondModel(SecondModelIsFirst):
    summed = False


@pytest.mark.slow
def test_cause_is_that_of_the_first_update_of_a_step_that_differs():
    twice = loop_gallery.check(SecondModelIsFirst, 8, 5, steps=1)
    assert twice.cause == causes.REDUCED_TWICE and twice.differences[0].factor == pytest.approx(2)
    means = loop_gallery.check(MeansOfSecondModel, 8, 5, steps=1)
    assert means.cause == causes.OWN_ROWS.format(how="summed")
    both = loop_gallery.check(MeansOfSecondModel, 8, steps=1)
    assert both.cause == causes.MEANS_OR_TWICE


class OneOptimizer(SecondModelIsFirst):
    """Trains both models by one optimizer, so that no order of its updates is known."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        with self.strategy.scope():
            self.optimizer = self.second_optimizer = tf_keras.optimizers.SGD(0.01)
        self.optimizer.build(self.second.trainable_variables + self.model.trainable_variables)


class SizeOfReplica(loop_gallery.Plain):
    """Divides by the rows of one replica, as if they were those of the global batch."""

    def share_of_loss(self, batch, outputs):
        losses = self.per_example_loss(batch, outputs)
        return tf.reduce_sum(losses) / (self.global_batch_size / self.strategy.num_replicas_in_sync)


@pytest.mark.slow
def test_causes_of_one_factor_on_all_splits_are_told_apart():
    assert loop_gallery.check(OneOptimizer, 8, 5, steps=1).cause == causes.REDUCED_TWICE
    assert loop_gallery.check(OneOptimizer, 8, steps=1).cause == causes.MEANS_OR_TWICE
    assert loop_gallery.check(SizeOfReplica, 8, 5, steps=1).cause == causes.MEANS_OR_TWICE


class CountsInPython(loop_gallery.Plain):
    """Multiplies the loss by a counter in Python, which each replica increments."""

    calls = 0

    def share_of_loss(self, batch, outputs):
        self.calls += 1
        return super().share_of_loss(batch, outputs) * self.factor()

    def factor(self):
        return self.calls


class CountsInVariable(CountsInPython):
    def factor(self):
        return 1.0 + tf.cast(self.optimizer.iterations, tf.float64)


class RootOfOwnRows(loop_gallery.Plain):
    """Divides by the root of the replica's rows, whose factor is none of the usual ones."""

    def share_of_loss(self, batch, outputs):
        losses = self.per_example_loss(batch, outputs)
        return tf.reduce_sum(losses) / tf.sqrt(tf.cast(tf.size(losses), losses.dtype))


@pytest.mark.parametrize("sizes", SIZES)
def test_counter_in_python_is_named_on_even_and_uneven_batches(sizes):
    assert loop_gallery.check(CountsInPython, *sizes, steps=1).cause == causes.PYTHON
    counted = loop_gallery.check(RootOfOwnRows, *sizes, steps=1).cause
    assert counted.startswith(causes.DENOMINATOR.partition("{")[0])


class KeepsLocal(loop_gallery.Plain):
    """Adds a term of the outputs, after the replicas have waited for each other."""

    def share_of_loss(self, batch, outputs):
        self.kept = kept = self.keep(batch, outputs)
        rows = gallery.all_reduce(gallery.SUM, tf.size(batch["label"]))
        term = 0.1 * tf.reduce_sum(tf.square(self.read(kept)))
        total = tf.reduce_sum(self.per_example_loss(batch, outputs)) + term
        return total / tf.cast(rows, total.dtype)

    def keep(self, batch, outputs):
        return outputs

    def read(self, kept):
        return kept


class LeavesOutputs(KeepsLocal):
    """Reads the term from an attribute, which another replica has overwritten meanwhile."""

    def read(self, kept):
        return self.kept


class LeavesRows(LeavesOutputs):
    """Leaves what the replica got in an attribute."""

    def keep(self, batch, outputs):
        return batch["x"]


class AppendsLosses(loop_gallery.Plain):
    """Each replica appends its loss to one list, and adds up the list."""

    def distributed_step(self, batch):
        self.losses = []
        return super().distributed_step(batch)

    def share_of_loss(self, batch, outputs):
        self.losses.append(super().share_of_loss(batch, outputs))
        return tf.add_n(self.losses)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loop", [LeavesOutputs, LeavesRows, AppendsLosses])
def test_tensor_of_another_replica_is_named_with_the_line(loop, sizes):
    cause = loop_gallery.check(loop, *sizes, steps=1).cause
    place, _, rest = cause.partition(" reads on one replica")
    assert re.search(r"rules_test\.py:\d+$", place)
    assert causes.SHARED.endswith(rest)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [CountsInVariable, KeepsLocal])
def test_loop_that_follows_the_advice_is_right(loop):
    assert loop_gallery.check(loop, 8, 5).verdict == "equivalent"


class ReturnsAttribute(loop_gallery.Plain):
    """Returns a loss that the last replica has left in an attribute."""

    def replica_step(self, batch):
        self.loss = super().replica_step(batch)
        gallery.all_reduce(gallery.SUM, tf.ones([]))
        return self.loss


def test_one_tensor_of_all_replicas_is_named():
    report = loop_gallery.check(ReturnsAttribute, 8, steps=1)
    assert report.headline[1] == causes.ONE_TENSOR


class ComputesInFloat32(loop_gallery.TwoModels):
    """Adds up the losses in float32; right but for the rounding."""

    def share_of_loss(self, batch, outputs):
        losses = tf.cast(self.per_example_loss(batch, outputs), tf.float32)
        return tf.cast(tf.reduce_sum(losses) / self.global_batch_size, outputs.dtype)


class ComputesInFloat32Twice(mistakes.ReducedTwice, ComputesInFloat32):
    apply = gallery.Steps.apply


@pytest.mark.parametrize("sizes", [pytest.param((8,), marks=pytest.mark.slow), (8, 5)])
def test_part_in_float32_is_named_and_compared_with_the_tolerance_of_float32(sizes, monkeypatch):
    monkeypatch.setattr(noise, "MARGIN", 0.0)  # as if another order of the rows changed nothing
    report = loop_gallery.check(ComputesInFloat32, *sizes, steps=1, replicas=(2, 4))
    assert report.verdict == "equivalent", report.failure()
    assert re.search(r"rules_test\.py:\d+ casts what is computed in float32", report.why)
    twice = loop_gallery.check(ComputesInFloat32Twice, *sizes, steps=1)
    cause = causes.REDUCED_TWICE if 5 in sizes else causes.MEANS_OR_TWICE
    assert twice.cause == cause
