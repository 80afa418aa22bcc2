"""Recurrent and attention networks: noise per time step, masking, sums over tokens."""

import tensorflow as tf
import tf_keras

from tests.users_code.examples import CLASSES, TOKENS, WORDS, Case

layers = tf_keras.layers


class SeriesCase(Case):
    features = ("series", "label")

    def build_layers(self):
        raise NotImplementedError

    def build_model(self):
        return tf_keras.Sequential([*self.build_layers(), layers.Dense(CLASSES)])


class RecurrentDropout(SeriesCase):
    """Keras' own dropout of recurrent layers, in both directions."""

    def build_layers(self):
        lstm = layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3)
        return [layers.Bidirectional(lstm)]


class NoisyCell(layers.Layer):
    """A recurrent cell that drops a part of its candidate in each time step."""

    def __init__(self, units=3):
        super().__init__()
        self.units = self.state_size = units
        self.dense = layers.Dense(units, activation="tanh")

    def drop(self, candidate):
        return tf.nn.dropout(candidate, 0.4)

    def call(self, inputs, states, training=None):
        candidate = self.dense(tf.concat([inputs, states[0]], axis=1))
        output = self.drop(candidate) if training else candidate
        return output, [output]


class NoisyCellCase(SeriesCase):
    def build_layers(self):
        return [layers.RNN(NoisyCell())]


class LayerInCell(NoisyCell):
    """The same with a Dropout layer, which is Keras' way."""

    def __init__(self, units=3):
        super().__init__(units)
        self.dropout = layers.Dropout(0.4)

    def drop(self, candidate):
        return self.dropout(candidate, training=True)


class LayerInCellCase(SeriesCase):
    def build_layers(self):
        return [layers.RNN(LayerInCell())]


class FoldedDropout(SeriesCase):
    """Folds rows and time into one axis before dropout, and unfolds them."""

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
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["target"], outputs, from_logits=True
        )

    def token_mask(self, batch):
        return batch["target"] < 8

    def per_example_loss(self, batch, outputs):
        losses = self.token_losses(batch, outputs)
        mask = tf.cast(self.token_mask(batch), losses.dtype)
        return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


class WeightedLanguageModel(LanguageModel):
    """The loss and the weight of each token."""

    def per_example_loss(self, batch, outputs):
        return self.token_losses(batch, outputs)

    def sample_weight(self, batch):
        return tf.cast(self.token_mask(batch), tf.float64)


class MaskedLanguageModel(LanguageModel):
    """Masks random tokens in the step; the loss is that of the masked tokens (Keras: BERT)."""

    def draw(self, tokens):
        chosen = tf.random.uniform(tf.shape(tokens)) < 0.4
        words = tf.random.uniform(tf.shape(tokens), 1, WORDS, tokens.dtype)
        return chosen, tf.random.uniform(tf.shape(tokens)) < 0.8, words

    def preprocess(self, batch):
        chosen, masked, words = self.draw(batch["tokens"])
        replaced = tf.where(masked, tf.zeros_like(words), words)
        tokens = tf.where(chosen, replaced, batch["tokens"])
        return {"tokens": tokens, "target": batch["tokens"], "weight": tf.cast(chosen, tf.float64)}

    def per_example_loss(self, batch, outputs):
        return self.token_losses(batch, outputs)
