"""Comparisons that would show nothing are rejected, or have a note."""

import numpy as np
import pytest
import tf_keras

from ctl.testing import check_loop_equivalence
from ctl.testing.report import NotComparable
from tests.testing import gallery, loop_gallery

EVALUATION = "No trainable variable changed: compared as an evaluation."


def check(build, batch_sizes=(4,), **options):
    return check_loop_equivalence(
        build,
        gallery.examples(24),
        replicas=(2,),
        batch_sizes=batch_sizes,
        steps=1,
        in_process=True,
        **options,
    )


class InvalidForFive(loop_gallery.Plain):
    """Computes NaN for each global batch of 5 rows."""

    def share_of_loss(self, batch, outputs):
        loss = super().share_of_loss(batch, outputs)
        return loss * np.nan if self.global_batch_size == 5 else loss


def test_loss_that_is_not_finite_on_a_later_batch_size_is_an_error():
    with pytest.raises(NotComparable, match=r"The loss is not finite on 1 replica \(5 rows\)"):
        check(InvalidForFive, (4, 5))


class NotApplied(loop_gallery.Plain):
    def apply(self, gradients, variables):
        pass


class WithoutLearningRate(loop_gallery.Plain):
    def build_optimizer(self):
        return tf_keras.optimizers.SGD(0.0)


def test_step_that_changes_nothing_is_noted():
    report = check(NotApplied)
    assert report.verdict == "equivalent"
    assert EVALUATION in report.notes


@pytest.mark.slow
def test_learning_rate_of_0_is_noted():
    report = check(WithoutLearningRate)
    assert report.verdict == "equivalent"
    assert report.notes == (
        f"With the loop's own optimizer: {EVALUATION[0].lower()}{EVALUATION[1:]}",
    )
