"""The dtypes of each precision, the rounding of its gradients, and the loss scale of float16."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.keras import precision
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests.support import faulty_trainers, reference_model
from tests.support.checks import close


def exact_gradient(trainer):
    """The float64 gradient of the first step, of 8 rows, at a trainer's weights."""
    rows = reference_model.pick(reference_model.examples(), faulty_trainers.batch_of(0))
    weights = [weight.astype(float) for weight in trainer.model.get_weights()]
    return reference_model.loss_and_gradients(weights, rows)[1]


def gradient(trainer):
    """One step of SGD with rate 1 moves the weights by the gradient."""
    before = trainer.model.get_weights()
    trainer.train(tf.constant(1))
    return [b - a for b, a in zip(before, trainer.model.get_weights(), strict=True)]


class Late(reference_model.ReferenceTrainer):
    """Creates a layer in its first training step, and another one in its first evaluation."""

    def build_metrics(self):
        return {}

    def forward(self, batch, training):
        outputs = super().forward(batch, training)
        if ctl.replica.current() is not None:
            layer = tf_keras.layers.Activation("tanh")
            self.policies = {**getattr(self, "policies", {}), training: layer.compute_dtype}
            self.floatx = tf_keras.backend.floatx()
        return outputs


def test_layers_that_a_first_call_creates_have_the_precision_of_the_trainer():
    strategy = testing.make_strategy(1)
    trainer = reference_model.make_trainer(strategy, 8, cls=Late, precision="bfloat16")
    trainer.train(tf.constant(1))
    ctl.StandardEvaluator(trainer).evaluate(tf.constant(1))
    assert trainer.policies == {True: "bfloat16", False: "bfloat16"}
    assert trainer.floatx == tf_keras.backend.floatx() == "float32"


def test_loss_that_reads_the_global_precision_is_exact_in_float64():
    class Huber(reference_model.ReferenceTrainer):
        def per_example_loss(self, batch, outputs):
            return tf_keras.losses.huber(tf.zeros_like(outputs), outputs, delta=100.0)

        def regularization_losses(self):
            return []

    trainer = reference_model.make_trainer(testing.make_strategy(2), 8, cls=Huber)
    evaluation = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    rows = reference_model.examples()
    outputs = trainer.model({"x": rows["x"], "token": rows["token"]}).numpy()
    losses = (outputs**2).mean(axis=1) / 2
    expected = (losses * rows["weight"]).sum() / rows["weight"].sum()
    assert float(evaluation["loss"]) == pytest.approx(expected, rel=1e-14)


def test_loss_scale_in_float64_gives_the_update_without_one():
    def scaled():
        return tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(1.0), dynamic=False, initial_scale=1024.0
        )

    def step(**options):
        return gradient(reference_model.make_trainer(testing.make_strategy(1), 8, **options))

    close(step(), step(optimizer=scaled), 1e-15)


def test_16_bit_outputs_are_cast_to_float32_with_their_mask_of_tf_keras():
    outputs = {"a": tf.constant([1.0], tf.bfloat16), "b": [tf.constant(1.0, tf.float16)]}
    outputs |= {"c": tf.constant(1.0, tf.float64), "d": tf.constant(1)}
    outputs["a"]._keras_mask = tf.constant([True])
    cast = precision.cast_to_float32(outputs)
    dtypes = [value.dtype for value in tf.nest.flatten(cast)]
    assert dtypes == [tf.float32, tf.float32, tf.float64, tf.int32]
    assert cast["a"]._keras_mask is outputs["a"]._keras_mask


def test_only_float16_gets_a_loss_scale_and_only_one():
    optimizer = tf_keras.optimizers.SGD(0.1)
    for name in ("float32", "float64", "bfloat16"):
        assert precision.wrap_loss_scale(optimizer, name, 0.0) is optimizer
    dynamic = precision.wrap_loss_scale(optimizer, "float16", 0.0)
    assert dynamic.dynamic and dynamic.loss_scale.numpy() == 2.0**15
    assert precision.wrap_loss_scale(dynamic, "float16", 8.0) is dynamic
    fixed = precision.wrap_loss_scale(tf_keras.optimizers.SGD(0.1), "float16", 8.0)
    assert not fixed.dynamic and fixed.loss_scale.numpy() == 8.0


def test_float16_computes_the_gradient_to_its_rounding_with_every_scale():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, precision="float16")
    weights, exact = trainer.model.get_weights(), exact_gradient(trainer)
    for scale in (1.0, 1024.0, 2.0**15):
        trainer.global_step.assign(0)
        trainer.model.set_weights(weights)
        trainer.optimizer._loss_scale._current_loss_scale.assign(scale)
        for one, other in zip(exact, gradient(trainer), strict=True):
            # 11 bits, and fewer than 16 operations in a row.
            assert np.abs(one - other).max() <= 16 * 2**-11 * max(1.0, np.abs(one).max())
        assert trainer.optimizer.loss_scale.numpy() == scale


@pytest.mark.slow
def test_loss_scale_grows_after_finite_steps_and_is_restored(tmp_path):
    def optimizer():
        return tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(1e-3), initial_scale=8.0, dynamic_growth_steps=3
        )

    options = {"precision": "float16", "optimizer": optimizer}
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, **options)
    trainer.train(tf.constant(7))
    assert trainer.optimizer.loss_scale.numpy() == 32.0
    Checkpointer(tmp_path, trainer).save()
    other = reference_model.make_trainer(testing.make_strategy(1), 8, **options)
    Checkpointer(tmp_path, other).all_restore_latest()
    for one in (trainer, other):
        one.train(tf.constant(3))
    assert other.optimizer.loss_scale.numpy() == trainer.optimizer.loss_scale.numpy() == 64.0
    faulty_trainers.same(faulty_trainers.state(trainer), faulty_trainers.state(other))


@pytest.mark.parametrize("initial", [4.0, 2.0**127])
def test_loss_scale_changes_as_in_tf_keras(initial):
    make = tf_keras.mixed_precision.LossScaleOptimizer
    ours, theirs = (
        make(tf_keras.optimizers.SGD(), initial_scale=initial, dynamic_growth_steps=2)
        for _ in range(2)
    )
    for finite in (True, True, True, False, True, True, True, True, False, False, False, False):
        precision.update_loss_scale(ours, tf.constant(finite))
        theirs._loss_scale.update([tf.constant(0.0 if finite else np.inf)])
        assert float(ours.loss_scale) == float(theirs.loss_scale)
        assert int(ours.dynamic_counter) == int(theirs.dynamic_counter)
