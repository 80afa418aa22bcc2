"""Recurrent and attention networks: noise per time step, masking, sums over tokens."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, TOKENS, WORDS, Case

layers = tf_keras.layers


class FoldedDropout(Case):
    """Folds rows and time into one axis before dropout, and unfolds them."""

    features = ("series", "label")

    def build_model(self):
        series = tf_keras.Input((TOKENS, 4))
        folded = tf.reshape(layers.Dense(3)(series), [-1, 3])
        dropped = layers.Dropout(0.5)(folded)
        last = layers.Dense(CLASSES)(tf.reshape(dropped, [-1, TOKENS * 3]))
        return tf_keras.Model(series, last)


class LanguageModel(Case):
    """The mean over the tokens that count, as the translation tutorials compute it: a scalar."""

    features = ("tokens", "target")

    def build_model(self):
        return tf_keras.Sequential(
            [layers.Embedding(WORDS, 3), layers.GRU(3, return_sequences=True), layers.Dense(WORDS)]
        )

    def forward(self, batch, training):
        return self.model(batch["tokens"], training=training)

    def token_losses(self, batch, outputs):
        return super().per_example_loss({"label": batch["target"]}, outputs)

    def token_mask(self, batch):
        return tf.cast(batch["target"] < 8, tf.float64)

    def per_example_loss(self, batch, outputs):
        losses, mask = self.token_losses(batch, outputs), self.token_mask(batch)
        return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


class WeightedLanguageModel(LanguageModel):
    """The loss and the weight of each token."""

    def per_example_loss(self, batch, outputs):
        return self.token_losses(batch, outputs)

    def sample_weight(self, batch):
        return self.token_mask(batch)
