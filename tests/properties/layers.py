"""The parts that random models are made of, by the names that a `Case` prints.

Every activation is smooth: at the kink of a ReLU, a rounding error changes the gradient by more than
any tolerance. For the same reason there is no max pooling.
"""

from collections.abc import Callable

import tensorflow as tf
import tf_keras

import ctl

L = tf_keras.layers
WIDTH, CLASSES, TOKENS, STEPS = 6, 3, 5, 3

# Input -> (shape of an example, kind of the tensor that the layers of the body get).
INPUTS = {
    "vector": ([WIDTH], "vector"),
    "sequence": ([STEPS, WIDTH], "sequence"),
    "tokens": ([STEPS], "sequence"),
    "masked_tokens": ([STEPS], "sequence"),
    "image": ([3, 3, WIDTH], "image"),
}


class Residual(L.Layer):
    """x + f(x), where f is a nested model with dropout and a layer that is used twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = tf_keras.Sequential([L.Dense(WIDTH, activation="tanh"), L.Dropout(0.4)])

    def call(self, x):
        return x + self.inner(self.inner(x))


class Noise(L.Layer):
    """Noise of `ctl.random`, keyed by the row."""

    def call(self, x, training=None):
        return x + ctl.random.normal(tf.shape(x), dtype=x.dtype) if training else x


class Attention(L.Layer):
    """Self-attention with dropout."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = L.MultiHeadAttention(2, WIDTH, dropout=0.3)

    def call(self, x, mask=None):
        return x + self.attention(x, x)


class Frozen(L.BatchNormalization):
    """Batch normalization that is not trained: it normalizes by its moving statistics."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.trainable = False


def twice(layer: L.Layer) -> Callable[[tf.Tensor], tf.Tensor]:
    """Shares a layer: the same weights are used at two places."""
    return lambda x: layer(layer(x))


def nested() -> tf_keras.Model:
    """A functional model inside of the model."""
    x = inputs = L.Input([WIDTH])
    branches = [L.Dense(WIDTH, activation="tanh")(x), L.Dropout(0.4)(x)]
    return tf_keras.Model(inputs, L.Dense(WIDTH)(L.Concatenate()(branches)))


# Name -> function that makes a layer, for tensors of any rank with WIDTH channels. The simplest first:
# a failing case is reduced to the first ones.
ANY = {
    "dense": lambda: L.Dense(WIDTH, activation="tanh"),
    "dropout": lambda: L.Dropout(0.4),
    "sync_batch_norm": ctl.SyncBatchNormalization,
    "batch_norm": L.BatchNormalization,  # model.sync_batch_norm=True converts it
    "frozen_batch_norm": Frozen,
    "layer_norm": L.LayerNormalization,
    "noise": Noise,
    "gaussian_noise": lambda: L.GaussianNoise(0.5),
    "residual": Residual,
    "spectral_norm": lambda: L.SpectralNormalization(L.Dense(WIDTH)),
    "shared": lambda: L.Dense(WIDTH, activation="tanh"),
}
LAYERS = {
    "vector": {**ANY, "nested": nested},
    "sequence": {
        **ANY,
        "lstm": lambda: L.LSTM(WIDTH, return_sequences=True),
        "lstm_dropout": lambda: L.LSTM(
            WIDTH, return_sequences=True, dropout=0.3, recurrent_dropout=0.3
        ),
        # Not the default activation, with which tf_keras also traces a kernel for GPUs.
        "gru": lambda: L.GRU(WIDTH, return_sequences=True, activation="softsign"),
        "attention": Attention,
        "conv1d": lambda: L.Conv1D(WIDTH, 2, padding="same"),
        "spatial_dropout": lambda: L.SpatialDropout1D(0.4),
    },
    "image": {
        **ANY,
        "conv": lambda: L.Conv2D(WIDTH, 2, padding="same", activation="tanh"),
        "depthwise": lambda: L.DepthwiseConv2D(2, padding="same"),
        "pool": lambda: L.AveragePooling2D(2, 1, padding="same"),
        "spatial_dropout": lambda: L.SpatialDropout2D(0.4),
    },
}
SYNC = ("sync_batch_norm", "batch_norm")  # they communicate in the forward pass


def apply_layers(
    names: tuple[str, ...], kind: str, x: tf.Tensor, *, recompute: bool, penalty: bool
) -> tf.Tensor:
    """Applies layers by name; called while a functional model is built.

    Args:
        names: names of `LAYERS[kind]`.
        kind: "vector", "sequence" or "image".
        x: [rows, ...], a Keras tensor.
        recompute: whether the backward pass computes the activations of each layer again.
        penalty: whether the kernels of dense layers have an L2 penalty.
    """
    for name in names:
        layer = LAYERS[kind][name]()
        if penalty and isinstance(layer, L.Dense):
            layer.kernel_regularizer = tf_keras.regularizers.L2(0.1)
        # ctl rejects the recomputation of a layer that assigns a variable.
        layer = ctl.recompute(layer) if recompute and name != "spectral_norm" else layer
        x = twice(layer)(x) if name == "shared" else layer(x)
    return x
