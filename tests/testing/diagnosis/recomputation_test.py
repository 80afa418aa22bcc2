"""Mistakes of a recomputation are the same on every split, and are detected on one."""

import pytest
import tf_keras

import ctl
from ctl.graphs import passes
from ctl.layers import recompute
from ctl.rows import row_mask
from ctl.testing import equivalence
from ctl.testing.comparison import tolerance_of
from ctl.testing.diagnosis import causes, differences
from ctl.testing.diagnosis.evidence import Evidence
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery


class Recomputed(gallery.Right):
    def build_model(self):
        layers = tf_keras.layers
        block = [layers.Dense(4), ctl.SyncBatchNormalization(), layers.Dropout(0.5)]
        recomputed = ctl.recompute(tf_keras.Sequential(block))
        inputs, outputs = layers.InputLayer((gallery.FEATURES,)), layers.Dense(gallery.CLASSES)
        return tf_keras.Sequential([inputs, recomputed, outputs])


SUBJECT = TrainerSubject(Recomputed, gallery.examples(), 1)


def check():
    """What the check finds by itself."""
    run = SUBJECT.start(Split(4))
    references = {4: run.record()}
    calibration = Calibration(tolerance_of("float64"))
    evidence = Evidence(SUBJECT, run, calibration, {}, references, recomputes=True)
    return differences.check_recomputation(evidence)


@pytest.mark.slow
def test_right_recomputation_passes():
    assert check()[0] == []


@pytest.mark.slow
def test_second_dropout_mask_is_named(monkeypatch):
    replay = row_mask.replay
    monkeypatch.setattr(row_mask, "replay", lambda rows, _: replay(rows, dict(rows.calls)))
    assert equivalence.run(SUBJECT, [Split(4, 2)]).cause == causes.RECOMPUTED


@pytest.mark.slow
def test_statistics_that_move_twice_are_named(monkeypatch):
    monkeypatch.setattr(passes, "in_second_pass", lambda: False)
    monkeypatch.setattr(recompute, "_check_second_pass", lambda *_: None)
    assert any(difference.kind == "statistic" for difference in check()[0])
