"""A small network that learns from a large one (distillation, Hinton et al. 2015, arXiv:1503.02531)."""

import tensorflow as tf
import tf_keras

import ctl
from experiments.trainers.mnist import MnistTrainer


class DistillTrainer(MnistTrainer):
    """Trains a student on few images; the teacher is the model of a run of experiments/mnist.py."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.teacher = MnistTrainer.build_model(self)  # init.models.teacher loads its weights
            self.teacher.trainable = False

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Reshape((28, 28, 1), input_shape=(28, 28)),
                # The name and the shape of the teacher's first layer, which init.variables loads.
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(16, 3, strides=2, activation="relu", name="narrow"),
                layers.Flatten(),
                layers.Dense(10, name="head"),
            ]
        )

    def build_dataset(self, split, input_context):
        source = super().build_dataset(split, input_context)
        if split != "train":
            return source
        return ctl.data.arrays(source.gather(tf.range(self.options.model.examples, dtype=tf.int64)))

    def per_example_loss(self, batch, outputs):
        options, losses = self.options.model, super().per_example_loss(batch, outputs)
        if not options.teacher_weight:
            return losses
        logits = self.teacher(batch["image"], training=False)
        soft = [tf.nn.softmax(x / options.temperature) for x in (logits, outputs)]
        # Times the square of the temperature, so that the size of the gradient does not depend on it.
        divergence = tf_keras.losses.kl_divergence(*soft) * options.temperature**2
        return losses + options.teacher_weight * divergence
