"""Batch normalizations of a part of the batch are named if the step assigns their statistics."""

import functools

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import running
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


class Several(Case):
    """Two batch normalizations without trained variables, one of them in a model of its own."""

    def build_model(self):
        norm = functools.partial(tf_keras.layers.BatchNormalization, center=False, scale=False)
        inner = tf_keras.Sequential([norm(name="second")])
        head = tf_keras.layers.Dense(CLASSES)
        return tf_keras.Sequential([norm(name="first", input_shape=[6]), inner, head])


def make(replicas, **options):
    return Several(
        global_batch_size=8,
        strategy=running.strategy(replicas),
        optimizer=running.OPTIMIZER,
        options=ctl.TrainerOptions(**options),
    )


def test_layers_are_named_in_one_line_if_the_batch_is_split(caplog):
    make(2).train(tf.constant(1))
    assert [("(first, second). Use" in line) for line in caplog.messages] == [True]
    caplog.clear()
    make(1).train(tf.constant(1))
    make(2, model={"sync_batch_norm": True}).train(tf.constant(1))
    options = {"sync_batch_norm": "per_micro_batch"}
    make(2, model=options, micro_batches=2).train(tf.constant(1))
    assert caplog.text == ""


def test_frozen_layer_is_named_once_it_is_trained(caplog):
    trainer = make(2)
    first, inner, _ = trainer.model.layers
    first.trainable = inner.trainable = False
    trainer.train(tf.constant(1))
    assert caplog.text == ""
    first.trainable = True
    trainer.train(tf.constant(1))
    assert "it is split (first). Use" in caplog.text


def test_normalization_in_inference_mode_does_not_depend_on_the_split():
    assert difference(train(InInferenceMode, Split(1)), train(InInferenceMode, Split(2))) <= 1e-10


class SecondModel(Case):
    """A model beside the trained one, such as a discriminator."""

    def build_model(self):
        self.second = tf_keras.Sequential([tf_keras.layers.BatchNormalization(name="of_second")])
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        normalized = self.second(batch["x"], training=True)
        return super().per_example_loss(batch, outputs + normalized[:, :CLASSES])


def test_layers_of_another_model_are_named(caplog):
    build(SecondModel, Split(2, 8)).train(tf.constant(1))
    assert any("(of_second). Use ctl.SyncBatch" in line for line in caplog.messages)
