"""Loops that compute in 16 bits are not compared, and are not reported to draw random numbers."""

import pytest
import tensorflow as tf
import tf_keras

from ctl.testing.diagnosis import causes
from ctl.testing.subjects import noise
from tests.testing import loop_gallery
from tests.testing.loop_gallery import check

layers = tf_keras.layers


class Mixed(loop_gallery.Plain):
    """Computes in bfloat16 by the policy of its layers."""

    def build_model(self):
        policy = tf_keras.mixed_precision.Policy("mixed_bfloat16")
        hidden = layers.Dense(5, activation="tanh", input_shape=(4,), dtype=policy)
        return tf_keras.Sequential([hidden, layers.Dense(3, dtype=policy)])

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, tf.cast(outputs, tf.float32))


@pytest.mark.slow
def test_mixed_precision_cannot_be_compared():
    report = check(Mixed, 8)
    assert report.verdict == "cannot tell"
    assert "computes in bfloat16" in report.failure()
    assert "set the policy to float32 or float64 for this test" in report.failure()


@pytest.mark.slow
def test_rounding_errors_are_not_reported_as_equal_random_numbers(monkeypatch):
    monkeypatch.setattr(noise, "find_narrow", lambda run: "")  # as for a cast in the step
    monkeypatch.setattr(noise, "_LARGE", 1e-4)  # a deeper model has larger rounding errors
    report = check(Mixed, 8)
    assert report.verdict == "cannot tell"
    assert "another order of the rows" in report.failure()


class Evaluation(loop_gallery.Plain):
    def replica_step(self, batch):
        outputs = self.model(batch["x"], training=False)
        outputs += tf.random.normal(tf.shape(outputs), dtype=outputs.dtype)
        return self.share_of_loss(batch, outputs)


def test_random_evaluation_is_reported_after_one_step():
    report = check(Evaluation, 8, steps=1)
    line = report.failure().splitlines()[0]
    assert line.startswith("Evaluation: loss on 2 replicas (") and causes.EVALUATION_NOISE in line
