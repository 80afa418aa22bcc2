"""Recognizes a step whose loss is far above the median of the steps before it."""

import tensorflow as tf

WINDOW = 101  # number of losses that the median is computed from; odd, so that it is one of them


class LossSpikes(tf.Module):
    """Keeps the last losses and compares each new one with their median.

        spikes = LossSpikes(3.0, dtype=tf.float32)              # in the strategy's scope
        spike = spikes.is_spike(loss)                           # in a replica context

    The losses are those of global batches, so all replicas agree. They are saved in the checkpoint, so
    the result does not depend on how often the run was restarted. Spikes enter the window too: a loss
    that stays high becomes the median.

    Args:
        factor: the multiple of the median above which a loss is a spike; 0 switches the check off.
        dtype: dtype of the loss.
    """

    def __init__(self, factor: float, *, dtype: tf.DType):
        # The names of this module, its attributes and its variables are part of every checkpoint.
        super().__init__(name="spikes")
        self.factor = factor
        # Every replica assigns the same reduced loss; without an aggregation tf.distribute rejects an
        # assignment in a replica context.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self._losses = tf.Variable(
            tf.zeros([WINDOW], dtype), trainable=False, name="last_losses", aggregation=first
        )
        self._count = tf.Variable(
            0, dtype=tf.int64, trainable=False, name="losses_seen", aggregation=first
        )

    def is_spike(self, loss: tf.Tensor) -> tf.Tensor:
        """Compares a loss and stores it if it is finite; call it once per step.

        With the median m of the last `WINDOW` losses, a loss above m + (factor - 1) |m| is a spike,
        which is factor times m if m is positive. No loss is a spike before the window is full.

        Args:
            loss: scalar, the loss of the global batch, the same on every replica.

        Returns:
            A scalar bool.
        """
        losses, count = self._losses.read_value(), self._count.read_value()
        loss = tf.cast(loss, losses.dtype)
        finite = tf.math.is_finite(loss)
        median = tf.sort(losses)[WINDOW // 2]
        # The distance from the median, so that the check holds for negative losses too.
        high = loss > median + (self.factor - 1) * tf.abs(median)
        # The window is a ring buffer: the new loss replaces the oldest one.
        oldest = tf.equal(tf.range(WINDOW, dtype=tf.int64), count % WINDOW)
        self._losses.assign(tf.where(tf.logical_and(oldest, finite), loss, losses))
        self._count.assign_add(tf.cast(finite, tf.int64))
        return tf.reduce_all([high, finite, count >= WINDOW])
