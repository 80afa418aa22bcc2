"""Small trainers whose updates are right; `mistakes` has those with a mistake."""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

FEATURES, CLASSES = 4, 3
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
layers = tf_keras.layers


def examples(count=16, seed=0):
    """Makes distinct examples."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, FEATURES)) * rng.uniform(0.3, 3, (count, 1)),
        "label": rng.integers(0, CLASSES, count),
    }


class Right(ctl.StandardTrainer):
    """Uses the step of ctl."""

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Dense(5, activation="tanh", input_shape=(FEATURES,)), layers.Dense(CLASSES)]
        )

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(examples())

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


class Weighted(Right):
    def sample_weight(self, batch):
        return 1.0 + tf.cast(batch["label"], tf.float32)


class Regularized(Right):
    def build_model(self):
        l2 = tf_keras.regularizers.L2(0.1)
        return tf_keras.Sequential(
            [
                layers.Dense(5, activation="tanh", kernel_regularizer=l2, input_shape=(FEATURES,)),
                layers.Dense(CLASSES),
            ]
        )


class Dropping(Right):
    def build_model(self):
        return tf_keras.Sequential(
            [
                layers.Dense(8, activation="tanh", input_shape=(FEATURES,)),
                layers.Dropout(0.4),
                layers.Dense(CLASSES),
            ]
        )


class Normalized(Right):
    def normalization(self):
        return ctl.SyncBatchNormalization()

    def build_model(self):
        return tf_keras.Sequential(
            [
                layers.Dense(5, input_shape=(FEATURES,)),
                self.normalization(),
                layers.Activation("tanh"),
                layers.Dense(CLASSES),
            ]
        )


class ByHand(Right):
    """Overrides replica_step completely, without accumulation."""

    def replica_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.forward(batch, training=True)
            loss = self.share_of_loss(batch, outputs)
            scaled = self.scale(loss)
        gradients = self.all_reduce(tape.gradient(scaled, variables))
        self.apply(gradients, variables)
        self.update_metrics(self.metrics, batch, outputs, ctl.replica.present())
        return self.all_reduce([loss])[0]

    def share_of_loss(self, batch, outputs):
        losses = self.masked(self.per_example_loss(batch, outputs))
        return tf.reduce_sum(losses) / self.global_batch_size

    def scale(self, loss):
        return loss * tf.cast(self.loss_scale(), loss.dtype)

    def loss_scale(self):
        return getattr(self.optimizer, "loss_scale", 1.0)

    def masked(self, losses):
        """Sets the losses of padding rows to zero; losses are [rows]."""
        present = ctl.replica.present()
        return losses if present is None else losses * tf.cast(present, losses.dtype)

    def count_rows(self, losses):
        """Returns the number of real rows on this replica."""
        present = ctl.replica.present()
        count = losses.shape[0] if present is None else tf.reduce_sum(present)
        return tf.cast(count, losses.dtype)

    def all_reduce(self, values):
        return tf.distribute.get_replica_context().all_reduce(SUM, values)

    def transform(self, gradients, variables):
        """Returns the gradients to apply; these are summed over the replicas and unscaled."""
        return gradients

    def apply(self, gradients, variables):
        gradients = [g / tf.cast(self.loss_scale(), g.dtype) for g in gradients]
        gradients = self.transform(gradients, variables)
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )


class Clipped(ByHand):
    """Clips the summed gradients."""

    def transform(self, gradients, variables):
        return tf.clip_by_global_norm(gradients, 0.05)[0]


class Decayed(ByHand):
    """Adds weight decay to the summed gradients."""

    def transform(self, gradients, variables):
        return [g + 0.1 * v for g, v in zip(gradients, variables, strict=True)]


class Penalized(Regularized, ByHand):
    """Divides the penalty by the number of replicas, since the shares are summed."""

    def share_of_loss(self, batch, outputs):
        replicas = self.strategy.num_replicas_in_sync
        return super().share_of_loss(batch, outputs) + tf.add_n(self.model.losses) / replicas


class TwoLosses(ByHand):
    """Adds an auxiliary loss on the same outputs."""

    def share_of_loss(self, batch, outputs):
        second = self.masked(tf.reduce_sum(tf.square(outputs), axis=1))
        first = super().share_of_loss(batch, outputs)
        return first + 0.1 * tf.reduce_sum(second) / self.global_batch_size


class Adversarial(Right):
    """Trains two models with two optimizers by `minimize`."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.second = tf_keras.Sequential([layers.Dense(1, input_shape=(FEATURES,))])
            self.second_optimizer = tf_keras.optimizers.Adam(0.01)

    def replica_step(self, batch):
        value = super().replica_step(batch)
        self.minimize(
            batch,
            lambda rows: tf.square(self.second(rows["x"])[:, 0]),
            variables=self.second.trainable_variables,
            optimizer=self.second_optimizer,
            regularization=list,
        )
        return value


class Counting(Right):
    """Counts examples in a variable that each replica updates for its own rows."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.strategy.scope():
            self.seen = tf.Variable(
                0.0,
                trainable=False,
                dtype=tf.float64,
                name="seen",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def replica_step(self, batch):
        present = ctl.replica.present()
        rows = batch["x"].shape[0] if present is None else tf.reduce_sum(present)
        self.seen.assign_add(tf.cast(rows, tf.float64))
        return super().replica_step(batch)


RIGHT = [
    Right,
    Weighted,
    Regularized,
    Dropping,
    Normalized,
    ByHand,
    Clipped,
    Decayed,
    Penalized,
    TwoLosses,
    Adversarial,
    Counting,
]
