"""Mistakes that no split reveals are found, and right trainers pass."""

import pytest
import tf_keras

import ctl
from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes, differences
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery, mistakes

PRECISE = Calibration(tolerance_of("float64"))


def make_evidence(cls, **arguments):
    subject = TrainerSubject(cls, gallery.examples(), 1, **arguments)
    return Evidence(subject, subject.start(Split(2)), PRECISE, {}, {})


class SquaresOfLargeNumbers(mistakes.SquaresOfLargeNumbers, gallery.Normalized):
    pass


def test_variance_by_squares_is_found():
    (difference,), cause = differences.check_normalization(make_evidence(SquaresOfLargeNumbers))
    assert cause == causes.SQUARES
    assert difference.name.startswith("variance of squares_batch_norm")
    assert difference.distance > 0.1


@pytest.mark.parametrize("layer", [ctl.SyncBatchNormalization, tf_keras.layers.BatchNormalization])
def test_exact_variances_pass(layer):
    class Trainer(gallery.Normalized):
        def normalization(self):
            return layer()

    assert differences.check_normalization(make_evidence(Trainer)) == differences.NOTHING


def test_step_that_fails_in_float16_is_noted():
    class Float64Only(gallery.ByHand):
        def share_of_loss(self, batch, outputs):
            if outputs.dtype != "float64":
                raise ValueError("only float64")
            return super().share_of_loss(batch, outputs)

    evidence = make_evidence(Float64Only)
    assert differences.check_loss_scale(evidence) == differences.NOTHING
    (note,) = evidence.notes
    assert note.startswith("The loss scale was not checked, since a step fails: ")
