"""The cases of pairs.py and state.py over the rows of the global batch, by `ctl.replica.all_gather`."""

import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import generative, normalization, pairs, state
from tests.users_code.examples import CLASSES, Case
from tests.users_code.pairs import cosine

layers = tf_keras.layers


def for_each_row(batch, loss):
    """A loss of the global batch, as the loss of each of its rows."""
    return tf.fill(tf.shape(next(iter(batch.values())))[:1], loss)


class ContrastiveLoss(pairs.ContrastiveLoss):
    def per_example_loss(self, batch, outputs):
        labels = ctl.replica.positions(outputs[0])
        one, two = ctl.replica.all_gather(outputs)
        logits = cosine(outputs[0], two) / 0.5, cosine(outputs[1], one) / 0.5
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        return sum(cross_entropy(labels, values) for values in logits) / 2


class LocalPlaces(pairs.Embedding):
    """Takes candidate i of the global batch for the positive of this replica's query i."""

    def per_example_loss(self, batch, outputs):
        return self.losses(outputs[0], ctl.replica.all_gather(outputs[1]))

    def losses(self, queries, candidates):
        scores = tf.matmul(queries, candidates, transpose_b=True)
        labels = tf.eye(tf.shape(scores)[0], tf.shape(scores)[1], dtype=scores.dtype)
        return tf.nn.softmax_cross_entropy_with_logits(labels, scores)


class RolledCandidates(LocalPlaces):
    def losses(self, queries, candidates):
        first = ctl.replica.positions(queries)[0]
        return super().losses(queries, tf.roll(candidates, -first, axis=0))


class BatchDice(pairs.BatchDice):
    def per_example_loss(self, batch, outputs):
        target, outputs = ctl.replica.all_gather((batch["segmentation"], outputs))
        return for_each_row(batch, super().per_example_loss({"segmentation": target}, outputs))


class HardestExamples(pairs.HardestExamples):
    """The mean over the largest half of the losses is that over all rows, scaled."""

    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs)
        everything = ctl.replica.all_gather(losses)
        count = tf.shape(everything)[0]
        smallest = tf.reduce_min(tf.math.top_k(everything, k=count // 2).values)
        scale = tf.cast(count, losses.dtype) / tf.cast(count // 2, losses.dtype)
        return scale * tf.where(losses >= smallest, losses, tf.zeros_like(losses))


class MomentumQueue(state.MomentumQueue):
    def losses(self, batch):
        losses = super().losses(batch)
        keys = tf.math.l2_normalize(self.key_model(batch["view"]), axis=1)
        self.queue_after = tf.concat([ctl.replica.all_gather(keys), self.queue], axis=0)
        return losses

    def replica_step(self, batch):
        loss = self.minimize(batch, self.losses)
        state.follow(self.key_model, self.model)
        self.queue.assign(self.queue_after[: self.length])
        return loss


class CenterLoss(state.CenterLoss):
    def per_example_loss(self, batch, outputs):
        losses = Case.per_example_loss(self, batch, outputs)
        difference = tf.stop_gradient(tf.gather(self.centers, batch["label"])) - outputs
        everything, labels = ctl.replica.all_gather((difference, batch["label"]))
        self.centers.assign_sub(0.5 * tf.math.unsorted_segment_mean(everything, labels, CLASSES))
        return losses + 0.1 * tf.reduce_sum(difference**2, axis=1)


class DataDependentInitialization(normalization.DataDependentInitialization):
    class layer(normalization.WeightNormalization):
        def variance(self, y):
            return tf.math.reduce_variance(ctl.replica.all_gather(y), axis=0)


class DivergenceByRow(generative.VariationalAutoencoder):
    """The divergence of each row in its loss, instead of add_loss; without noise, too."""

    def build_model(self):
        x, z_mean, z_log_var = generative.encode()
        return tf_keras.Model(x, [layers.Dense(6)(z_mean), z_mean, z_log_var])
