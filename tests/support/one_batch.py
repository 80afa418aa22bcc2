"""Compares the first step and the evaluation of a trainer with its loss on one undivided batch.

A trainer class under test has `EXAMPLES` (name -> array), `build_model`, and a static method
`reference(model, rows)` that returns the per-element losses of a global batch and their weights, on
one device, without ctl.
"""

import functools

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

strategy = functools.cache(testing.make_strategy)


class Trainer(ctl.StandardTrainer):
    """Trains on the first examples, in their order."""

    EXAMPLES: dict

    def build_dataset(self, split, input_context):
        return tf.data.Dataset.from_tensor_slices(self.EXAMPLES)


def make(cls, batch, replicas, **options):
    """Makes a trainer in float64 whose update is the gradient; `replicas` may be a strategy."""
    options.setdefault("precision", "float64")
    return cls(
        strategy=strategy(replicas) if isinstance(replicas, int) else replicas,
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(1.0),
        options=ctl.TrainerOptions(**options),
    )


def reference(trainer, rows, penalty=lambda model: 0.0):
    """The loss of a global batch and its gradients, computed at once."""
    with tf.GradientTape() as tape:
        losses, weights = trainer.reference(trainer.model, rows)
        mean = tf.math.divide_no_nan(tf.reduce_sum(losses * weights), tf.reduce_sum(weights))
        loss = mean + penalty(trainer.model)
    gradients = tape.gradient(loss, trainer.model.trainable_variables)
    return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]  # dense


def check_first_step(trainer, *, tolerance=1e-12, penalty=lambda model: 0.0):
    """Every replica's copy must move by the gradient of the undivided batch."""
    size = trainer.global_batch_size
    rows = {name: tf.constant(values[:size]) for name, values in trainer.EXAMPLES.items()}
    loss, gradients = reference(trainer, rows, penalty)
    variables = trainer.model.trainable_variables
    before = [testing.copies(trainer.strategy, variable)[0] for variable in variables]
    outputs = trainer.train(tf.constant(1))
    np.testing.assert_allclose(float(outputs["loss"]), float(loss), rtol=tolerance)
    for variable, old, gradient in zip(variables, before, gradients, strict=True):
        for copy in testing.copies(trainer.strategy, variable):
            np.testing.assert_allclose(old - copy, gradient, rtol=0, atol=tolerance)
            assert np.abs(gradient).max() > 1e-3  # so that the comparison means something


def check_evaluation(trainer, size, *, tolerance=1e-12):
    """The weighted mean over all examples, in batches of `size`, of which the last is ragged."""
    count = len(next(iter(trainer.EXAMPLES.values())))
    assert count % size
    total = weight = 0.0
    for start in range(0, count, size):
        rows = {k: tf.constant(v[start : start + size]) for k, v in trainer.EXAMPLES.items()}
        losses, weights = trainer.reference(trainer.model, rows)
        total, weight = total + tf.reduce_sum(losses * weights), weight + tf.reduce_sum(weights)
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=size)
    results = evaluator.evaluate(tf.constant(-1))
    np.testing.assert_allclose(float(results["loss"]), float(total / weight), rtol=tolerance)
    assert int(results["examples"]) == count
