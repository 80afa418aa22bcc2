"""What a trainer reports of an inner loop, whose steps may be skipped."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.measure import non_finite
from tests.support import reference_model
from tests.support.faulty_trainers import BAD, BATCH, Jumping, Overflowing, Poisoned


class ReportsOutputs:
    """Mixin: a metric that is the mean of the first output, so that each step changes it."""

    def build_metrics(self):
        return {"output": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["output"].update_state(outputs[:, 0], sample_weight=weights)


def reporting(cls, replicas, *, attributes=(), **options):
    planted = type("Planted", (ReportsOutputs, cls), dict(attributes))
    return reference_model.make_trainer(
        testing.make_strategy(replicas), BATCH, cls=planted,
        optimizer=lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9), **options,
    )  # fmt: skip


def check_report(trainer, path, *, first, skipped, steps=4):
    """Checks that a loop reports the mean over its applied steps, as loops of one step report them."""
    trainer.train(tf.constant(first))
    checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
    saved = checkpoint.write(str(path / "ckpt"))
    reports = [trainer.train(tf.constant(1)) for _ in range(steps)]
    applied = [r for i, r in enumerate(reports, start=first) if i != skipped]
    assert len(applied) == steps - 1
    skipped_steps = trainer.skipped_steps.numpy()
    checkpoint.read(saved).assert_consumed()
    outputs = trainer.train(tf.constant(steps))
    assert trainer.skipped_steps.numpy() == skipped_steps >= 1
    for name in ("loss", "output"):
        expected = np.mean([float(report[name]) for report in applied])
        assert float(outputs[name]) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "replicas", "replica", "options"),
    [("gradient", 2, 1, {"micro_batches": 2}), ("loss", 1, 0, {"xla": "step"})],
)
def test_step_that_overflows_is_not_reported(what, replicas, replica, options, tmp_path):
    """The gradient overflows with a finite loss, or the loss is infinite."""
    planted = {"replica": replica, "at": BAD, "what": what}
    trainer = reporting(Overflowing, replicas, attributes=planted, precision="float16", **options)
    check_report(trainer, tmp_path, first=1, skipped=BAD)


@pytest.mark.slow
def test_spike_that_is_skipped_is_not_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(non_finite, "WINDOW", 11)
    at = non_finite.WINDOW + 2
    trainer = reporting(
        Jumping, 2, attributes={"jumps_at": at}, on_non_finite="skip", loss_spike=5.0
    )
    check_report(trainer, tmp_path, first=at - 1, skipped=at)


@pytest.mark.slow
def test_nan_in_the_outputs_of_a_skipped_step_is_not_in_the_metrics(tmp_path):
    trainer = reporting(Poisoned, 1, attributes={"row": 7}, xla="loop", on_non_finite="skip")
    check_report(trainer, tmp_path, first=1, skipped=BAD)


def test_loop_without_an_applied_step_has_no_loss_and_no_metrics():
    options = {"micro_batches": 2, "norms": "global", "on_non_finite": "skip"}
    trainer = reporting(Poisoned, 1, attributes={"row": 5}, **options)
    assert np.isfinite(trainer.train(tf.constant(BAD))["loss"])
    outputs = trainer.train(tf.constant(1))
    assert int(outputs.pop("skipped_steps")) == 1
    assert {"loss", "output", "update_norm"} <= outputs.keys()
    means = (value for name, value in outputs.items() if not name.endswith("_share"))
    assert all(np.isnan(value) for value in means)
    assert np.isfinite(trainer.train(tf.constant(1))["loss"])


def test_loop_that_overflows_in_every_step_has_no_loss():
    trainer = reporting(reference_model.ReferenceTrainer, 1, precision="float16", loss_scale=1e30)
    outputs = trainer.train(tf.constant(3))
    assert np.isnan(outputs["loss"]) and np.isnan(outputs["output"])
    assert outputs["loss_scale"] == 1e30 and outputs["skipped_steps"] == 3


def test_own_train_step_that_reports_no_loss_has_none():
    class Own(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            next(iterator)
            self.global_step.assign_add(1)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 7, cls=Own)
    assert "loss" not in trainer.train(tf.constant(2))


class DrawsInMetrics(reference_model.ReferenceTrainer):
    """Two metrics, each with a draw of its own."""

    def build_metrics(self):
        return {name: tf_keras.metrics.Mean() for name in "ab"}

    def update_metrics(self, metrics, batch, outputs, weights):
        for metric in metrics.values():
            noise = ctl.random.uniform([None], dtype=tf.float64)
            metric.update_state(noise, sample_weight=weights)


@pytest.mark.slow
def test_metrics_draw_the_numbers_of_the_undivided_batch_in_every_micro_batch():
    one, other = (
        reference_model.make_trainer(
            testing.make_strategy(replicas), 8, cls=DrawsInMetrics, micro_batches=micro_batches
        ).train(tf.constant(1))
        for replicas, micro_batches in ((1, 1), (2, 2))
    )
    assert one["a"] != one["b"]
    for name in "ab":
        np.testing.assert_allclose(other[name], one[name], rtol=1e-14)
