"""What a trainer reports of an inner loop, whose steps may be skipped.

Tests of a loop without an applied step are in metrics_test.py and tests/update/update_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "replicas", "attributes", "options"),
    [
        # The gradient overflows with a finite loss, or the loss is infinite.
        (Overflowing, 2, {"replica": 1, "at": BAD}, {"precision": "float16", "micro_batches": 2}),
        (Overflowing, 1, {"at": BAD, "what": "loss"}, {"precision": "float16", "xla": "step"}),
        (Jumping, 2, {"jumps_at": 13}, {"on_non_finite": "skip", "loss_spike": 5.0}),
        # The outputs are not numbers either.
        (Poisoned, 1, {"row": 7}, {"on_non_finite": "skip", "xla": "loop"}),
    ],
)
def test_report_is_the_mean_over_the_applied_steps_as_loops_of_one_step_report_them(
    cls, replicas, attributes, options, tmp_path, small_window
):
    trainer = reporting(cls, replicas, attributes=attributes, **options)
    skipped, steps = attributes.get("jumps_at", BAD), 4
    trainer.train(tf.constant(skipped - 1))
    checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
    saved = checkpoint.write(str(tmp_path / "ckpt"))
    reports = [trainer.train(tf.constant(1)) for _ in range(steps)]
    del reports[1]
    skipped_steps = trainer.skipped_steps.numpy()
    checkpoint.read(saved).assert_consumed()
    outputs = trainer.train(tf.constant(steps))
    assert trainer.skipped_steps.numpy() == skipped_steps >= 1
    for name in ("loss", "output"):
        expected = np.mean([float(report[name]) for report in reports])
        assert float(outputs[name]) == pytest.approx(expected, rel=1e-5), name


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
