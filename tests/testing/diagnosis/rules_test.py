"""Each planted mistake is found, and its cause is reported."""

import re

import pytest
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.testing import check_replica_equivalence
from ctl.testing.diagnosis import causes
from tests.testing import gallery, loop_gallery, mistakes


def check(mistake, **arguments):
    # A step rejects some mistakes before their numbers can be compared.
    options = TrainerOptions(allow_unkeyed_random=mistake.unkeyed, allow_row_coupling=True)
    report = check_replica_equivalence(
        mistake.trainer, gallery.examples(), in_process=True, options=options, **arguments
    )
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
    check(
        mistake,
        replicas=mistake.replicas,
        accumulation=mistake.accumulation,
        batch_sizes=mistake.batch_sizes,
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mistake", mistakes.OF_TRAINERS, ids=lambda m: m.name)
def test_planted_mistake_is_named_by_the_default_comparison(mistake):
    check(mistake)


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
    report = check_replica_equivalence(
        DependsOnReplicas,
        gallery.examples(),
        replicas=(2,),
        accumulation=(1,),
        batch_sizes=(8,),
        steps=1,
        in_process=True,
    )
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


def test_cause_is_that_of_the_first_update_of_a_step_that_differs():
    twice = loop_gallery.check(SecondModelIsFirst, 8, 5, steps=1)
    assert twice.cause == causes.REDUCED_TWICE and twice.differences[0].factor == pytest.approx(2)
    means = loop_gallery.check(MeansOfSecondModel, 8, 5, steps=1)
    assert means.cause == causes.OWN_ROWS.format(how="summed")
    both = loop_gallery.check(MeansOfSecondModel, 8, steps=1)
    assert both.cause == causes.MEANS_OR_TWICE
