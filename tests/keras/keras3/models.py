"""Models of all kinds for both packages, and a loop by hand that trains those of Keras 3."""

import dataclasses

import keras
import tensorflow as tf

import ctl
from ctl.keras import precision
from tests.keras.keras3 import twins

BATCH, STEPS, SEED = 7, 10, 3


def transformer(k, rate):
    inputs = k.Input((5, 6))
    x = k.layers.MultiHeadAttention(2, 3, dropout=rate)(inputs, inputs)
    x = k.layers.LayerNormalization()(k.layers.Add()([inputs, x]))
    return k.Model(inputs, k.layers.Dense(4)(k.layers.GlobalAveragePooling1D()(x)))


def recurrent(k, rate):
    return k.Sequential(
        [
            k.Input((5, 6)),
            k.layers.SpatialDropout1D(rate),
            k.layers.GRU(4, dropout=rate, recurrent_dropout=rate),
            k.layers.GaussianNoise(rate),
            k.layers.Dense(4),
        ]
    )


def embedding(k, rate):
    return k.Sequential(
        [
            k.Input((6,)),
            k.layers.Embedding(9, 4),
            k.layers.Dropout(rate),
            k.layers.Flatten(),
            k.layers.Dense(4),
        ]
    )


def subclassed(k, rate):
    class Model(k.Model):
        def __init__(self):
            super().__init__()
            self.hidden = k.layers.Dense(5, activation="tanh")
            self.norm = k.layers.BatchNormalization()
            self.drop = k.layers.Dropout(rate)
            self.last = k.layers.Dense(4)

        def call(self, inputs, training=False):
            hidden = self.norm(self.hidden(inputs), training=training)
            return self.last(self.drop(hidden, training=training))

    return Model()


class Tokens(twins.Twin):
    shape = (6,)

    @staticmethod
    def inputs(x, dtype):
        return tf.cast(x, tf.int32) % 9


def of_shape(*shape):
    """Returns a trainer of examples of a shape."""
    return type("Shaped", (twins.Twin,), {"shape": shape})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        build: builds it from a package and the rate of its random layers.
        cls: the trainer.
        normalized: whether it has batch normalizations.
    """

    build: object
    cls: type
    normalized: bool = False

    def trainer(self, package=keras, *, rate=0.3, **options):
        """Returns a trainer; with batch normalizations that of the global batch."""
        options.setdefault("seed", SEED)
        return twins.make_trainer(
            package, cls=self.cls, make=lambda k: self.build(k, rate),
            model={"sync_batch_norm": self.normalized}, **options,
        )  # fmt: skip

    def train(self, *arguments, **options):
        """Returns the weights after all steps."""
        return twins.train(self.trainer(*arguments, **options), STEPS)[1]

    def train_by_hand(self, batch=BATCH):
        """Trains without random layers and without ctl's step, as the guide of Keras 3 does."""
        examples = self.cls.build_dataset(self.cls, "train", None)
        batches = iter(ctl.data.distribute(examples, batch, seed=SEED))
        with precision.scope("float64"):
            model, optimizer = self.build(keras, 0.0), keras.optimizers.Adam(0.01)
            for step in range(STEPS):
                rows, *_ = next(batches)
                x = self.cls.inputs(rows["x"], tf.float64)
                if step == 0:
                    model(x)
                    twins.initialize(model.weights)
                self._step(model, optimizer, x, rows["label"])
        return [v.numpy() for v in model.weights]

    def _step(self, model, optimizer, x, label):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(label, outputs, from_logits=True)
            loss = tf.reduce_mean(losses) + sum(model.losses)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        # Keras 3 would not add the rows of one token (docs/prove-your-loop.md).
        optimizer.apply(list(map(tf.convert_to_tensor, gradients)), model.trainable_variables)


KINDS = {
    "convolutional": Kind(twins.convolutional, twins.Twin, normalized=True),
    "transformer": Kind(transformer, of_shape(5, 6)),
    "recurrent": Kind(recurrent, of_shape(5, 6)),
    "embedding": Kind(embedding, Tokens),
    "subclassed": Kind(subclassed, of_shape(6), normalized=True),
}
