"""Mistakes of a recomputation are the same on every split, and are detected on one."""

import tf_keras

import ctl
from ctl.configs.options import TrainerOptions
from ctl.replica import row_mask
from ctl.replica.memory import passes, recompute_checks
from ctl.testing import trial
from ctl.testing.diagnosis import causes
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec
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


def check():
    spec = TrialSpec(Recomputed, gallery.examples(), None, TrainerOptions(), steps=1)
    return trial.run(spec, [Split(4, 2)])


def test_right_recomputation_passes():
    assert check().equivalent


def test_second_dropout_mask_is_named(monkeypatch):
    replay = row_mask.replay
    monkeypatch.setattr(row_mask, "replay", lambda rows, _: replay(rows, dict(rows.calls)))
    assert check().cause == causes.OTHER_PASS


def test_statistics_that_move_twice_are_named(monkeypatch):
    monkeypatch.setattr(passes, "in_second_pass", lambda: False)
    monkeypatch.setattr(recompute_checks, "check_second_pass", lambda *_: None)
    assert check().cause == causes.MOVED_TWICE
