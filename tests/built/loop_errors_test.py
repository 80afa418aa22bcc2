"""Errors of XLA and of the replica context are explained in one line."""

import pytest
import tensorflow as tf
import tf_keras

from ctl.built import loop_errors
from ctl.testing import tiny
from tests.support import one_batch
from tests.support.checks import one_line


def test_operation_without_a_deterministic_kernel_is_named():
    error = tf.errors.UnimplementedError(
        *(None, None),
        "Graph execution error:\nGPU MaxPool gradient ops do not yet have a deterministic XLA "
        "implementation.\n\t [[{{node gradient_tape/MaxPoolGrad}}]]",
    )
    assert loop_errors.explain_xla(error) == (
        "GPU MaxPool gradient ops do not yet have a deterministic XLA implementation, so "
        "runtime.deterministic must be false"
    )


class Numbered(tf_keras.layers.Layer):
    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        return inputs + tf.cast(context.replica_id_in_sync_group, inputs.dtype)


class InLayer(tiny.TinyTrainer):
    def build_model(self):
        return tf_keras.Sequential([Numbered(), tf_keras.layers.Dense(3)])


class InPreprocess(tiny.TinyTrainer):
    def preprocess(self, batch):
        return {**batch, "x": Numbered()(batch["x"])}


@pytest.mark.parametrize(
    ("cls", "place"),
    [(InLayer, "The call of layer numbered"), (InPreprocess, r"loop_errors_test\.py:\d+")],
)
def test_replica_context_while_the_model_is_built_is_one_line(cls, place):
    message = f"{place}.* uses replica_id_in_sync_group of .* which is None while"
    with one_line(message):
        one_batch.make(cls, 8, 2)


class Unique(tiny.TinyTrainer):
    def per_example_loss(self, batch, outputs):
        return tf.unique(tf.reduce_sum(outputs, axis=1))[0]


def test_operation_without_a_gradient_is_one_line():
    trainer = one_batch.make(Unique, 8, 1)
    with one_line("no gradient for the operation Unique"):
        trainer.train(tf.constant(1))
