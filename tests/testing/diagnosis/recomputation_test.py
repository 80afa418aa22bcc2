"""Mistakes of a recomputation are the same on every split, and are detected on one."""

import tf_keras

import ctl
from ctl.configs.options import TrainerOptions
from ctl.replica.arithmetic import row_mask
from ctl.replica.graphs import passes
from ctl.replica.layers import recompute
from ctl.testing import trial
from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes, recomputation
from ctl.testing.recording import record_run
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from tests.testing import gallery


class Recomputed(gallery.Right):
    def build_model(self):
        layers = tf_keras.layers
        block = [layers.Dense(4), ctl.SyncBatchNormalization(), layers.Dropout(0.5)]
        return tf_keras.Sequential(
            [
                layers.InputLayer((gallery.FEATURES,)),
                ctl.recompute(tf_keras.Sequential(block)),
                layers.Dense(gallery.CLASSES),
            ]
        )


def make_spec():
    return TrialSpec(Recomputed, gallery.examples(), None, TrainerOptions(), steps=1)


def check():
    """The cause that the check finds by itself."""
    split, precision = Split(4), "float64"
    record = record_run(build_trainer(make_spec(), split, precision=precision), split, steps=1)
    tolerance = tolerance_of(precision)
    return recomputation.check(make_spec(), record, precision=precision, tolerance=tolerance)[1]


def test_right_recomputation_passes():
    assert check() == ""


def test_second_dropout_mask_is_named(monkeypatch):
    replay = row_mask.replay
    monkeypatch.setattr(row_mask, "replay", lambda rows, _: replay(rows, dict(rows.calls)))
    assert trial.run(make_spec(), [Split(4, 2)]).cause == causes.OTHER_PASS


def test_statistics_that_move_twice_are_named(monkeypatch):
    monkeypatch.setattr(passes, "in_second_pass", lambda: False)
    monkeypatch.setattr(recompute, "_check_second_pass", lambda *_: None)
    assert check() == causes.MOVED_TWICE
