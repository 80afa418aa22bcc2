"""Batch normalizations of a part of the batch are named if the step assigns their statistics."""

import pytest
import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split, build, difference, train


class Normalized(Case):
    training = None

    def build_model(self):
        base = tf_keras.Sequential([tf_keras.layers.BatchNormalization()])
        inputs = tf_keras.Input([6])
        return tf_keras.Model(
            inputs, tf_keras.layers.Dense(CLASSES)(base(inputs, training=self.training))
        )


class InInferenceMode(Normalized):
    training = False


@pytest.mark.parametrize("case", [Normalized, InInferenceMode])
def test_only_statistics_that_the_step_assigns_are_named(case, caplog):
    build(case, Split(2)).train(tf.constant(1))
    lines = [x for x in caplog.messages if "(batch_normalization). Use ctl.SyncBatch" in x]
    assert len(lines) == (case is Normalized)


def test_normalization_in_inference_mode_does_not_depend_on_the_split():
    assert difference(train(InInferenceMode, Split(1)), train(InInferenceMode, Split(2))) <= 1e-10
