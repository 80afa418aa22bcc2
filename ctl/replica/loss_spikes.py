"""Which steps have a loss far above those of the steps before."""

import tensorflow as tf

WINDOW = 101  # losses that the median is of


class LossSpikes(tf.Module):
    """Remembers the last losses, and tells the next one by their median.

        spikes = Spikes(3.0, dtype=tf.float32)              # under the strategy's scope
        seen = spikes.seen(loss)                            # in a replica context

    The losses are those of global batches, so that every replica decides alike, and belong to the
    state of a run: a step is judged alike however often the run was killed. Spikes are remembered
    too, so that a loss that stays high becomes the median.
    """

    def __init__(self, factor: float, *, dtype: tf.DType):
        """Makes the variables; call it under the strategy's scope.

        Args:
            factor: how many times the median is a spike; 0 if nobody asks.
            dtype: of the loss.
        """
        super().__init__(name="spikes")
        self.factor = factor
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self._losses = tf.Variable(
            tf.zeros([WINDOW], dtype), trainable=False, name="last_losses", aggregation=first
        )
        self._count = tf.Variable(
            0, dtype=tf.int64, trainable=False, name="losses_seen", aggregation=first
        )

    def seen(self, loss: tf.Tensor) -> tf.Tensor:
        """Whether a loss is a spike; remembers it if it is finite. Call it once a step.

        With median m of the last `WINDOW` losses, a loss above m + (factor - 1) |m| is one: above
        factor times m where m is positive. Before there are so many losses, none is.

        Args:
            loss: of the global batch, a scalar, the same on every replica.

        Returns:
            A scalar bool.
        """
        losses, count = self._losses.read_value(), self._count.read_value()
        loss = tf.cast(loss, losses.dtype)
        finite = tf.math.is_finite(loss)
        median = tf.sort(losses)[WINDOW // 2]
        spike = loss > median + (self.factor - 1) * tf.abs(median)
        here = tf.logical_and(tf.equal(tf.range(WINDOW, dtype=tf.int64), count % WINDOW), finite)
        self._losses.assign(tf.where(here, loss, losses))
        self._count.assign_add(tf.cast(finite, tf.int64))
        return tf.reduce_all([spike, finite, count >= WINDOW])
