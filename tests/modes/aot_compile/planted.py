"""Trainers with one planted problem each, on the line marked `planted`."""

import tensorflow as tf

from tests.support import reference_model

BATCH = 8


def in_loss(change):
    """A ReferenceTrainer whose losses are transformed by `change`."""

    class Planted(reference_model.ReferenceTrainer):
        def per_example_loss(self, batch, outputs):
            losses = super().per_example_loss(batch, outputs)
            return change(self, batch, losses)

    return Planted


def print_loss(trainer, batch, losses):
    tf.print("loss", losses)  # planted
    return losses


def sized(trainer, batch, losses):
    return losses + tf.cast(tf.size(tf.range(batch["token"][0])), tf.float32)  # planted


def masked(trainer, batch, losses):
    return losses + tf.reduce_sum(tf.boolean_mask(losses, losses > 0))  # planted


def variable(trainer, batch, losses):
    return losses * tf.Variable(1.0)  # planted


def double(trainer, batch, losses):
    return losses + tf.cast(tf.cast(losses, tf.float64) * 2.0, tf.float32)  # planted


def summary(trainer, batch, losses):
    with trainer.writer.as_default(step=1):
        tf.summary.scalar("loss", tf.reduce_mean(losses))  # planted
    return losses


def callback_in_branch(trainer, batch, losses):
    def called():
        seen = tf.py_function(lambda x: x, [losses], tf.float32)  # planted
        return tf.ensure_shape(seen, losses.shape)

    return tf.cond(losses[0] > 0, called, lambda: losses)


def group(trainer, batch, losses):
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    groups = [[0, 1, 2]]  # of four replicas
    total = gen_xla_ops.xla_all_reduce(losses, groups, reduce_op="Add", mode="CrossReplica")
    return losses + tf.stop_gradient(total)


class UnknownBatch(reference_model.ReferenceTrainer):
    """Returns global batches of an unknown number of rows."""

    data_factory = staticmethod(reference_model.as_global_batches)


class TooLarge(reference_model.ReferenceTrainer):
    """Needs a matrix of 64 GiB between two products."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        column = tf.reduce_sum(self.model.trainable_variables[0]) * tf.ones([2**17, 8])
        matrix = tf.sin(tf.matmul(column, column, transpose_b=True))
        return losses + tf.reduce_sum(tf.matmul(matrix, tf.matmul(matrix, column)))
