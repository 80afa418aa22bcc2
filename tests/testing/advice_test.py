"""A trainer with a planted mistake is right once the advice that is printed for it is followed."""

import pytest
import tensorflow as tf

from ctl.configs.options import TrainerOptions
from ctl.testing.diagnosis import causes
from tests.testing import gallery, mistakes
from tests.testing.gallery import Steps, all_reduce


class DividesByGlobalRows:
    """Sums the losses of the rows that exist, and divides by the rows of the global batch."""

    masked, share_of_loss = Steps.masked, Steps.share_of_loss


class SumsOnce:
    """Calls apply_gradients with experimental_aggregate_gradients=False."""

    apply_summed = Steps.apply_summed


class SumsShares:
    apply = Steps.apply


class ClipsSum:
    def apply(self, gradients, variables):
        summed = all_reduce(gallery.SUM, gradients)
        self.apply_summed(tf.clip_by_global_norm(summed, 0.05)[0], variables)


class DividesPenalty:
    def share_of_loss(self, batch, outputs):
        penalty = tf.add_n(self.model.losses) / self.strategy.num_replicas_in_sync
        return Steps.share_of_loss(self, batch, outputs) + penalty


class DecaysOnce:
    def apply(self, gradients, variables):
        summed = all_reduce(gallery.SUM, gradients)
        decayed = [g + 0.1 * v for g, v in zip(summed, variables, strict=True)]
        self.apply_summed(decayed, variables)


class DividesAuxiliary:
    def share_of_loss(self, batch, outputs):
        second = self.masked(batch, tf.reduce_sum(tf.square(outputs), axis=1))
        share = 0.1 * tf.reduce_sum(second) / self.global_batch_size
        return Steps.share_of_loss(self, batch, outputs) + share


class ReducesLoss:
    reduce_loss = Steps.reduce_loss


class PassesWeights:
    update_metrics = gallery.Right.update_metrics


# Mistake, batch sizes -> the cause and what following its advice changes.
EVEN, BOTH, UNEVEN = (8,), (8, 5), (5,)
FOLLOWED = {
    (mistakes.LocalMean, EVEN): (causes.MEANS_OR_TWICE, DividesByGlobalRows),
    (mistakes.LocalMean, BOTH): (mistakes.TWICE_PADDING, DividesByGlobalRows),
    # Its loss is divided by the rows of the global batch, so the second half of the advice applies.
    (mistakes.ReducedTwice, EVEN): (causes.MEANS_OR_TWICE, SumsOnce),
    (mistakes.ReducedTwice, BOTH): (causes.REDUCED_TWICE, SumsOnce),
    (mistakes.Averaged, EVEN): (causes.AVERAGED, SumsShares),
    (mistakes.MeanOfMeans, UNEVEN): (mistakes.AVERAGED, DividesByGlobalRows),
    (mistakes.PaddingCounted, UNEVEN): (mistakes.TWICE_PADDING, DividesByGlobalRows),
    (mistakes.ClippedBeforeReduction, EVEN): (causes.CLIPPED, ClipsSum),
    (mistakes.PenaltyOncePerReplica, EVEN): (mistakes.TWO_PENALTIES, DividesPenalty),
    (mistakes.DecayedOncePerReplica, EVEN): (mistakes.TWO_PENALTIES, DecaysOnce),
    (mistakes.AuxiliaryMean, EVEN): (causes.PART_SUMMED, DividesAuxiliary),
    (mistakes.LossNotReduced, EVEN): (causes.LOSS, ReducesLoss),
    (mistakes.MetricOfPadding, UNEVEN): (causes.METRIC_PADDING, PassesWeights),
}
BASES = {mistake.part: mistake.trainer_base for mistake in mistakes.MISTAKES}


def compare(*parts, sizes, replicas=(1, 2, 4)):
    options = TrainerOptions(allow_row_coupling=True)
    trainer = type("Trainer", parts, {})
    return gallery.check(trainer, *sizes, replicas=replicas, accumulation=(1, 2), options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "sizes"), [pytest.param(*key, id=key[0].__name__) for key in FOLLOWED]
)
def test_advice_that_is_followed_makes_the_trainer_right(mistake, sizes):
    cause, fix = FOLLOWED[mistake, sizes]
    parts = (mistake, BASES[mistake])
    # The error of one term shows in how it grows from 2 to 4 replicas.
    reports = (compare(*parts, sizes=sizes, replicas=each) for each in ((1, 2), (1, 2, 4)))
    assert any(cause in report.cause for report in reports)
    report = compare(fix, *parts, sizes=(8, 5), replicas=(1, 2))
    assert report.equivalent, report.failure()


def test_every_advice_about_an_update_is_followed():
    texts = {cause for cause, _ in FOLLOWED.values()}
    known = {v for k, v in vars(causes).items() if k.isupper() and "{" not in v}
    required = {causes.MEANS_OR_TWICE, causes.REDUCED_TWICE, causes.AVERAGED}
    assert known & texts >= required | {causes.PART_SUMMED, causes.LOSS}


class CountsInPython:
    """Multiplies the loss by a counter in Python, which each replica increments."""

    calls = 0

    def share_of_loss(self, batch, outputs):
        self.calls = self.calls % self.strategy.num_replicas_in_sync + 1
        return Steps.share_of_loss(self, batch, outputs) * self.calls


@pytest.mark.slow
def test_counter_in_python_is_named():
    cause = compare(CountsInPython, gallery.ByHand, sizes=EVEN, replicas=(1, 2)).cause
    assert cause == causes.PYTHON
