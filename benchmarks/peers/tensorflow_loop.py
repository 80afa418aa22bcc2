"""The models in a hand-written loop of TensorFlow: many steps in one tf.function.

python -m benchmarks.peers.tensorflow_loop off|step TASK
"""

import tensorflow as tf
import tf_keras

from benchmarks.peers import keras_models
from benchmarks.peers.task import run
from benchmarks.peers.tensorflow_data import dataset


def train(task, tick, xla):
    """Trains in a loop; with `xla="step"`, XLA compiles the step."""
    model = keras_models.build(tf_keras, task)
    optimizer = keras_models.optimizer(tf_keras, task)
    optimizer.build(model.trainable_variables)
    loss_fn = keras_models.loss_fn(tf_keras, task)
    mean, metrics = tf_keras.metrics.Mean(), keras_models.metrics(tf_keras, task)

    @tf.function(jit_compile=xla == "step")
    def step(x, labels):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.reduce_mean(loss_fn(labels, outputs))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(loss)
        for metric in metrics:
            metric.update_state(labels, outputs)

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            step(*next(iterator))

    def read_loss():
        loss = float(mean.result())
        mean.reset_state()
        return loss

    tick.sync = read_loss
    iterator = iter(dataset(task))
    while True:
        loop(iterator, tf.constant(task.steps_per_loop))
        tick(task.steps_per_loop)


if __name__ == "__main__":
    run(train)
