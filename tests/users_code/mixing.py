"""Augmentation that mixes the rows of a batch, and noise in the labels."""

import tensorflow as tf

from tests.users_code.examples import CLASSES, Case


def soft_cross_entropy(labels, outputs):
    return tf.nn.softmax_cross_entropy_with_logits(labels, outputs)


class MixUp(Case):
    """Each example is mixed with another one of the batch, by a share drawn from Beta(a, a).

    Keras' example draws the Beta number from two Gamma numbers, and takes the other examples from a
    second shuffled dataset; here they are the batch in random order, as in the authors' own code.
    """

    alpha = 0.4

    def draw_order(self, batch):
        return tf.random.shuffle(tf.range(tf.shape(batch["x"])[0]))

    def draw_share(self, count, dtype):
        one, two = (tf.random.gamma([count], self.alpha, dtype=dtype) for _ in range(2))
        return one / (one + two)

    def mix(self, batch):
        order = self.draw_order(batch)
        share = self.draw_share(tf.shape(batch["x"])[0], batch["x"].dtype)[:, None]
        labels = tf.one_hot(batch["label"], CLASSES, dtype=batch["x"].dtype)
        other = tf.gather(batch["x"], order), tf.gather(labels, order)
        return {
            "x": share * batch["x"] + (1 - share) * other[0],
            "label": share * labels + (1 - share) * other[1],
        }

    def replica_step(self, batch):
        def losses(part):
            mixed = self.mix(part)
            return soft_cross_entropy(mixed["label"], self.model(mixed["x"], training=True))

        return self.minimize(batch, losses)
