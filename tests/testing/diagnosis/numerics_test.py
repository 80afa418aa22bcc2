"""Inexact variances are found by their errors; exact ones are not."""

import pytest
import tf_keras

import ctl
from ctl.configs.options import TrainerOptions
from ctl.testing import make_strategy
from ctl.testing.diagnosis import causes, numerics
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from tests.testing import gallery, mistakes


def check(cls):
    spec = TrialSpec(cls, gallery.examples(), None, TrainerOptions(), steps=1)
    return numerics.check(spec, build_trainer(spec, Split(2), precision="float64"))


def test_variance_by_squares_is_found():
    (difference,), cause, _ = check(mistakes.SquaresOfLargeNumbers)
    assert cause == causes.SQUARES
    assert difference.name.startswith("variance of squares_batch_norm")
    assert difference.distance > 0.1


@pytest.mark.parametrize("layer", [ctl.SyncBatchNormalization, tf_keras.layers.BatchNormalization])
def test_exact_variances_pass(layer):
    class Trainer(gallery.Normalized):
        def normalization(self):
            return layer()

    assert check(Trainer) == ([], "", [])


def test_loss_scale_that_is_not_removed_is_found():
    (difference,), cause, _ = check(mistakes.NotUnscaled)
    assert cause == causes.LOSS_SCALE
    assert difference.factor == 8


def test_step_that_fails_in_float16_is_noted():
    class Float64Only(gallery.ByHand):
        def share_of_loss(self, batch, outputs):
            if outputs.dtype != "float64":
                raise ValueError("only float64")
            return super().share_of_loss(batch, outputs)

    assert make_strategy(1).num_replicas_in_sync == 1
    differences, _, (note,) = check(Float64Only)
    assert differences == []
    assert "The loss scale was not checked, since float16 fails: " in note
