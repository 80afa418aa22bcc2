"""Small trainers whose updates are right; `loop_gallery` has loops, and `mistakes` has wrong ones.

The classes with a name such as `Penalizes` are parts of trainers and loops.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

FEATURES, CLASSES = 4, 3
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
layers = tf_keras.layers


def examples(count=16, seed=0):
    """Makes distinct examples."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)) * rng.uniform(0.3, 3, (count, 1))
    return {"x": x, "label": rng.integers(0, CLASSES, count)}


def check(cls, *batch_sizes, accumulation=(1,), seed=0, **options):
    """Compares a trainer in this process."""
    arguments = {"in_process": True, "accumulation": accumulation, **options}
    if batch_sizes:
        arguments["batch_sizes"] = batch_sizes
    return testing.check_replica_equivalence(cls, examples(seed=seed), **arguments)


def all_reduce(op, values):
    return tf.distribute.get_replica_context().all_reduce(op, values)


class Classifies:
    """The model, its loss and its metric."""

    def build_model(self):
        hidden = layers.Dense(5, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dense(CLASSES)])

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy("accuracy")}


class Steps:
    """A replica_step that sums the gradients itself, without accumulation."""

    def replica_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.forward(batch, training=True)
            loss = self.share_of_loss(batch, outputs)
            scaled = loss * tf.cast(self.loss_scale(), loss.dtype)
        self.apply(self.unscale(tape.gradient(scaled, variables)), variables)
        self.update_metrics(self.metrics, batch, outputs, self.present(batch))
        return self.reduce_loss(loss)

    def share_of_loss(self, batch, outputs):
        losses = self.masked(batch, self.per_example_loss(batch, outputs))
        weights = self.sample_weight(batch)
        losses = losses if weights is None else losses * weights
        return tf.reduce_sum(losses) / self.global_batch_size

    def loss_scale(self):
        return getattr(self.optimizer, "loss_scale", 1.0)

    def unscale(self, gradients):
        return [g / tf.cast(self.loss_scale(), g.dtype) for g in gradients]

    def present(self, batch):
        """Returns 1 for each row, and 0 for padding; None if there is none."""
        return ctl.replica.present()

    def masked(self, batch, losses):
        """Sets the losses of padding rows to zero; losses are [rows]."""
        present = self.present(batch)
        return losses if present is None else losses * tf.cast(present, losses.dtype)

    def count_rows(self, batch, losses):
        """Returns the number of real rows on this replica."""
        present = self.present(batch)
        count = tf.size(losses) if present is None else tf.reduce_sum(present)
        return tf.cast(count, losses.dtype)

    def apply(self, gradients, variables):
        self.apply_summed(all_reduce(SUM, gradients), variables)

    def apply_summed(self, gradients, variables):
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )

    def reduce_loss(self, loss):
        return all_reduce(SUM, loss)


class Regularizes:
    """Has a model with a penalty."""

    def build_model(self):
        l2 = tf_keras.regularizers.L2(0.1)
        hidden = layers.Dense(5, activation="tanh", kernel_regularizer=l2, input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dense(CLASSES)])


class Penalizes(Regularizes):
    """Divides the penalty by the number of replicas, since the shares are summed."""

    def share_of_loss(self, batch, outputs):
        penalty = tf.add_n(self.model.losses) / self.strategy.num_replicas_in_sync
        return super().share_of_loss(batch, outputs) + penalty


class Normalizes:
    """Has a model with a normalization layer."""

    def build_model(self):
        hidden = layers.Dense(5, input_shape=(FEATURES,))
        outputs = [layers.Activation("tanh"), layers.Dense(CLASSES)]
        return tf_keras.Sequential([hidden, self.normalization(), *outputs])


class Right(Classifies, ctl.StandardTrainer):
    """Uses the step of ctl."""

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(examples())


class Weighted(Right):
    def sample_weight(self, batch):
        return 1.0 + tf.cast(batch["label"], tf.float32)


class Regularized(Regularizes, Right):
    pass


class Dropping(Right):
    def build_model(self):
        hidden = layers.Dense(8, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dropout(0.4), layers.Dense(CLASSES)])


class Normalized(Normalizes, Right):
    def normalization(self):
        return ctl.SyncBatchNormalization()


class ByHand(Steps, Right):
    pass


class Penalized(Penalizes, ByHand):
    pass


class Adversarial(Right):
    """Trains two models with two optimizers by `minimize`."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.second = tf_keras.Sequential([layers.Dense(1, input_shape=(FEATURES,))])
            self.second_optimizer = tf_keras.optimizers.Adam(0.01)

    def replica_step(self, batch):
        value = super().replica_step(batch)
        second = dict(variables=self.second.trainable_variables, optimizer=self.second_optimizer)
        losses = lambda rows: tf.square(self.second(rows["x"])[:, 0])  # noqa: E731
        self.minimize(batch, losses, regularization=list, **second)
        return value


RIGHT = [
    Right, Weighted, Regularized, Dropping, Normalized, Adversarial, ByHand, Penalized,
]  # fmt: skip
