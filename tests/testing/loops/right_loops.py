"""Small training loops in plain TensorFlow whose updates are right; `wrong_loops` has the others."""

import numpy as np
import tensorflow as tf
import tf_keras

FEATURES, CLASSES = 4, 3
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
layers = tf_keras.layers


def examples(count=24, seed=0):
    """Makes distinct examples."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, FEATURES)) * rng.uniform(0.3, 3, (count, 1)),
        "label": rng.integers(0, CLASSES, count),
    }


def all_reduce(op, values):
    return tf.distribute.get_replica_context().all_reduce(op, values)


class Plain:
    """The step of the custom training tutorials: compute_average_loss, apply_gradients, reduce."""

    def __init__(self, strategy, global_batch_size):
        self.strategy, self.global_batch_size = strategy, global_batch_size
        with strategy.scope():
            self.model = self.build_model()
            self.optimizer = self.build_optimizer()
            self.accuracy = self.build_metric()
        self.step = tf.function(self.distributed_step)

    @property
    def variables(self):
        return [self.model, self.optimizer, self.accuracy]

    def build_model(self):
        hidden = layers.Dense(5, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dense(CLASSES)])

    def build_optimizer(self):
        return tf_keras.optimizers.Adam(0.01)

    def build_metric(self):
        return tf_keras.metrics.SparseCategoricalAccuracy("accuracy")

    def distributed_step(self, batch):
        losses = self.strategy.run(self.replica_step, args=(batch,))
        return self.strategy.reduce(SUM, losses, axis=None)

    def replica_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.model(batch["x"], training=True)
            loss = self.share_of_loss(batch, outputs)
        self.apply(tape.gradient(loss, variables), variables)
        self.update_metric(batch, outputs)
        return loss

    def losses(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def share_of_loss(self, batch, outputs):
        return tf.nn.compute_average_loss(
            self.losses(batch, outputs), global_batch_size=self.global_batch_size
        )

    def apply(self, gradients, variables):
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def update_metric(self, batch, outputs):
        self.accuracy.update_state(batch["label"], outputs)


class ByHand(Plain):
    """Sums the gradients itself."""

    def apply(self, gradients, variables):
        self.apply_summed(all_reduce(SUM, gradients), variables)

    def apply_summed(self, gradients, variables):
        self.optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )


class Clipped(ByHand):
    """Clips the summed gradients."""

    def apply_summed(self, gradients, variables):
        super().apply_summed(tf.clip_by_global_norm(gradients, 0.05)[0], variables)


class Decayed(ByHand):
    """Adds weight decay to the summed gradients."""

    def apply_summed(self, gradients, variables):
        pairs = zip(gradients, variables, strict=True)
        super().apply_summed([g + 0.1 * v for g, v in pairs], variables)


class Penalized(Plain):
    """Divides the penalty by the number of replicas."""

    def build_model(self):
        l2 = tf_keras.regularizers.L2(0.1)
        hidden = layers.Dense(5, activation="tanh", kernel_regularizer=l2, input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dense(CLASSES)])

    def share_of_loss(self, batch, outputs):
        penalty = tf.nn.scale_regularization_loss(tf.add_n(self.model.losses))
        return super().share_of_loss(batch, outputs) + penalty


class Weighted(Plain):
    """Divides by the sum of the sample weights of the global batch."""

    def share_of_loss(self, batch, outputs):
        losses = self.losses(batch, outputs)
        weights = 1.0 + tf.cast(batch["label"], losses.dtype)
        total = all_reduce(SUM, tf.reduce_sum(weights))
        return tf.reduce_sum(weights * losses) / tf.stop_gradient(total)


class Masked(Plain):
    """Takes full per-replica batches with a mask of rows: mask="mask"."""

    mask = "mask"

    def losses(self, batch, outputs):
        return super().losses(batch, outputs) * batch["mask"]

    def update_metric(self, batch, outputs):
        self.accuracy.update_state(batch["label"], outputs, sample_weight=batch["mask"])


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
        mean, variance = self.moments(inputs)
        for variable, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            variable.assign(0.9 * variable + 0.1 * value)
        return (inputs - mean) * tf.math.rsqrt(variance + self.epsilon)

    def moments(self, x):
        rows = all_reduce(SUM, tf.cast(tf.shape(x)[0], x.dtype))
        mean = all_reduce(SUM, tf.reduce_sum(x, 0)) / rows
        return mean, all_reduce(SUM, tf.reduce_sum(tf.square(x - mean), 0)) / rows


class Normalized(Plain):
    def build_model(self):
        hidden = layers.Dense(5, input_shape=(FEATURES,))
        outputs = [layers.Activation("tanh"), layers.Dense(CLASSES)]
        return tf_keras.Sequential([hidden, self.build_normalization(), *outputs])

    def build_normalization(self):
        return SynchronizedNorm()


class TwoModels(Plain):
    """Trains a second model with an optimizer of its own."""

    def __init__(self, strategy, global_batch_size):
        super().__init__(strategy, global_batch_size)
        with strategy.scope():
            self.second = tf_keras.Sequential([layers.Dense(1, input_shape=(FEATURES,))])
            self.second_optimizer = tf_keras.optimizers.Adam(0.01)

    @property
    def variables(self):
        return [*super().variables, self.second, self.second_optimizer]

    def replica_step(self, batch):
        loss = super().replica_step(batch)
        variables = self.second.trainable_variables
        with tf.GradientTape() as tape:
            share = self.second_loss(batch)
        gradients = tape.gradient(share, variables)
        self.apply_second(gradients, variables)
        return loss

    def second_loss(self, batch):
        losses = tf.square(self.second(batch["x"])[:, 0])
        return tf.reduce_sum(losses) / self.global_batch_size

    def apply_second(self, gradients, variables):
        self.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))


class Scaled(Plain):
    """Scales the loss, and the gradients back."""

    def build_optimizer(self):
        return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam(0.01))

    def replica_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.share_of_loss(batch, self.model(batch["x"], training=True))
            scaled = self.optimizer.get_scaled_loss(loss)
        self.apply(self.unscale(tape.gradient(scaled, variables)), variables)
        return loss

    def unscale(self, gradients):
        return self.optimizer.get_unscaled_gradients(gradients)


RIGHT = [
    Plain,
    ByHand,
    Clipped,
    Decayed,
    Penalized,
    Weighted,
    Masked,
    Normalized,
    TwoModels,
    Scaled,
]
