"""Graphs with custom gradients are freed, and differentiated as before."""

import gc
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
import tf_keras

from tests.support import one_batch


@tf.custom_gradient
def doubled(x):
    return (
        2.0 * x,
        lambda dy: 3.0 * dy * x,
    )  # not the derivative, and it needs a tensor of the graph


def registered():
    return {name for name in ops.gradient_registry.list() if name.startswith("CustomGradient")}


class Trainer(one_batch.Trainer):
    EXAMPLES = {"x": np.ones([2, 1]), "label": np.ones([2, 1])}  # noqa: RUF012

    def build_model(self):
        return tf_keras.Sequential([tf_keras.Input([1], name="x"), tf_keras.layers.Dense(1)])

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(tf.square(outputs - batch["label"]), axis=1)


def differentiated_after_its_trace():
    """Returns a weak reference to the graph of a function whose gradient is traced later."""

    @tf.function
    def inner(x):
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, doubled(x)), [0, x])[1]

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x)
        return tape.gradient(y, x)

    x = tf.constant(5.0)
    assert inner(x) == 20.0
    gc.collect()
    assert gradient(x) == (3 * 5) * (3 * 10)
    return weakref.ref(inner.get_concrete_function(x).graph)


def test_a_traced_function_can_be_differentiated_later_and_is_then_freed():
    known = registered()
    graph = differentiated_after_its_trace()
    assert registered() - known
    gc.collect()
    assert graph() is None
    assert registered() <= known


def test_graphs_of_a_trainer_are_freed_with_it():
    trainer = one_batch.make(Trainer, 2, 2)
    known = registered()
    trainer.train(tf.constant(1))
    assert registered() - known  # of all_reduce
    del trainer
    gc.collect()
    assert registered() <= known
