"""Small training loops in plain TensorFlow whose updates are right; `mistakes` has wrong ones."""

import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.testing.contents import holders
from tests.testing import gallery
from tests.testing.gallery import FEATURES, SUM, Classifies, Steps, all_reduce, layers


def check(build, *batch_sizes, **options):
    """Compares a loop on two replicas in this process."""
    defaults = dict(replicas=(2,), mask=getattr(build, "mask", ""), in_process=True)
    return testing.check_loop_equivalence(
        build, gallery.examples(24), batch_sizes=batch_sizes, **{**defaults, **options}
    )


class Plain(Steps, Classifies):
    """The step of the custom training tutorials: compute_average_loss, apply_gradients, reduce."""

    loss_op = SUM

    def __init__(self, strategy, global_batch_size):
        self.strategy, self.global_batch_size = strategy, global_batch_size
        with strategy.scope():
            self.model = self.build_model()
            self.optimizer = self.build_optimizer()
            self.metrics = self.build_metrics()
        self.step = tf.function(self.distributed_step)

    @property
    def variables(self):
        return holders(vars(self))

    def build_optimizer(self):
        return tf_keras.optimizers.Adam(0.01)

    def distributed_step(self, batch):
        losses = self.strategy.run(self.replica_step, args=(batch,))
        return self.strategy.reduce(self.loss_op, losses, axis=None)

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def sample_weight(self, batch):
        return None

    def present(self, batch):
        return None

    def share_of_loss(self, batch, outputs):
        losses = self.masked(batch, self.per_example_loss(batch, outputs))
        return tf.nn.compute_average_loss(
            losses, self.sample_weight(batch), global_batch_size=self.global_batch_size
        )

    def update_metrics(self, metrics, batch, outputs, weights):
        for metric in metrics.values():
            metric.update_state(batch["label"], outputs, sample_weight=weights)

    def apply(self, gradients, variables):
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def reduce_loss(self, loss):
        return loss


class ByHand(Plain):
    """Sums the gradients itself."""

    apply = Steps.apply


class Regularized(gallery.Regularizes, ByHand):
    pass


class Penalized(gallery.Penalizes, Plain):
    pass


class Masked(Plain):
    """Takes full per-replica batches with a mask of rows: mask="mask"."""

    mask = "mask"

    def present(self, batch):
        return batch["mask"]


class SynchronizedNorm(layers.Layer):
    """Batch normalization by sums and counts over the replicas, for any number of rows."""

    epsilon = 1e-3

    def build(self, shape):
        mean = tf.VariableAggregation.MEAN
        self.moving_mean, self.moving_variance = (
            self.add_weight(name, shape[-1:], initializer=value, trainable=False, aggregation=mean)
            for name, value in (("moving_mean", "zeros"), ("moving_variance", "ones"))
        )

    def call(self, inputs, training=None):
        if not training:
            return (inputs - self.moving_mean) * tf.math.rsqrt(self.moving_variance + self.epsilon)
        rows = all_reduce(SUM, tf.cast(tf.shape(inputs)[0], inputs.dtype))
        mean = all_reduce(SUM, tf.reduce_sum(inputs, 0)) / rows
        variance = all_reduce(SUM, tf.reduce_sum(tf.square(inputs - mean), 0)) / rows
        for variable, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            variable.assign(0.9 * variable + 0.1 * value)
        return (inputs - mean) * tf.math.rsqrt(variance + self.epsilon)


class Normalized(gallery.Normalizes, Plain):
    def normalization(self):
        return SynchronizedNorm()


class TwoModels(Plain):
    """Trains a second model with an optimizer of its own."""

    def __init__(self, strategy, global_batch_size):
        super().__init__(strategy, global_batch_size)
        with strategy.scope():
            self.second = tf_keras.Sequential([layers.Dense(1, input_shape=(FEATURES,))])
            self.second_optimizer = tf_keras.optimizers.Adam(0.01)

    def replica_step(self, batch):
        loss = super().replica_step(batch)
        variables = self.second.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.square(self.second(batch["x"])[:, 0])
            share = tf.reduce_sum(losses) / self.global_batch_size
        gradients = tape.gradient(share, variables)
        self.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss


class Scaled(Plain):
    """Scales the loss, and the gradients back."""

    def build_optimizer(self):
        return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam(0.01))


# Each requires something else of the comparison.
DIFFERENT = [Masked, Normalized, Penalized, Scaled, TwoModels]
RIGHT = [*DIFFERENT, Plain, ByHand]
