"""The models that the loops are measured on, in tf_keras and Keras 3, with their data."""

import abc
import dataclasses
import functools
import pathlib

import numpy as np
import tensorflow as tf

GPU = bool(tf.config.list_physical_devices("GPU"))
MNIST = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "data" / "mnist"


@dataclasses.dataclass(frozen=True)
class Model(abc.ABC):
    """A model with its data.

    Attributes:
        batch: examples per step.
        steps_per_loop: steps per call from Python.
        has_accuracy: whether the loop updates an accuracy in addition to the mean loss.
        precision: "float32", "float16" or "bfloat16", as `runtime.precision`.
    """

    batch: int
    steps_per_loop: int = 100
    has_accuracy: bool = True
    precision: str = "float32"

    @abc.abstractmethod
    def build(self, keras, dropout: float = 0.5):
        """Builds the model with a Keras module."""

    @abc.abstractmethod
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples as they are stored, and their labels."""

    def floats(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples as float32, converted in advance as in the tutorials."""
        x, y = self.arrays()
        return (x / np.float32(255) if x.dtype == np.uint8 else x), y

    def optimizer(self, keras):
        return keras.optimizers.Adam(1e-3)

    def loss_fn(self, keras):
        """Returns a function (labels, outputs) -> [rows] losses."""
        return functools.partial(_cross_entropy, keras)

    def metrics(self, keras) -> dict:
        if not self.has_accuracy:
            return {}
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy("accuracy")}


class Empty(Model):
    """One scalar variable and a loss that ignores the data: measures the overhead of the loop."""

    def build(self, keras, dropout=0.0):
        class Scalar(keras.layers.Layer):
            def build(self, input_shape):
                self.scalar = self.add_weight(name="scalar", shape=(), initializer="ones")

            def call(self, x):
                return tf.broadcast_to(tf.convert_to_tensor(self.scalar), [tf.shape(x)[0], 1])

        return keras.Sequential([keras.layers.Input((1,)), Scalar()])

    def arrays(self):
        return np.ones([60_000, 1], np.float32), np.zeros([60_000], np.int32)

    def optimizer(self, keras):
        return keras.optimizers.SGD(1e-3)

    def loss_fn(self, keras):
        return lambda labels, outputs: tf.square(outputs[:, 0])


class Mnist(Model):
    """The network with two convolutions of the MNIST tutorials."""

    def build(self, keras, dropout=0.5):
        layers = keras.layers
        stack = [layers.Input((28, 28)), layers.Reshape((28, 28, 1))]
        for filters in (32, 64):
            stack += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
        stack += [layers.Flatten(), layers.Dense(128, activation="relu")]
        return keras.Sequential([*stack, layers.Dropout(dropout), layers.Dense(10)])

    def arrays(self):
        from ctl.data.files.images import read_idx  # not by the first step of other programs

        images = read_idx(MNIST / "train-images-idx3-ubyte.gz")
        return images, read_idx(MNIST / "train-labels-idx1-ubyte.gz").astype(np.int32)


@dataclasses.dataclass(frozen=True)
class ResNet50(Model):
    """ResNet-50 on random images.

    Attributes:
        size: height and width of the images.
    """

    size: int = 224

    def build(self, keras, dropout=0.0):
        size = {"input_shape": (self.size, self.size, 3), "classes": 1000}
        return keras.applications.ResNet50(weights=None, classifier_activation=None, **size)

    def arrays(self):
        draw = np.random.default_rng(0)
        images = draw.integers(0, 256, [512, self.size, self.size, 3], np.uint8)
        return images, draw.integers(0, 1000, [512]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Dense(Model):
    """Dense layers without biases on random numbers.

    Attributes:
        width: the units of a layer, and the features of an example.
        depth: the number of layers.
        rows: the number of examples.
    """

    width: int = 3072
    depth: int = 8
    rows: int = 16

    def build(self, keras, dropout=0.0):
        dense, options = keras.layers.Dense, {"activation": "relu", "use_bias": False}
        hidden = [dense(self.width, **options) for _ in range(self.depth)]
        return keras.Sequential([keras.layers.Input((self.width,)), *hidden, dense(10)])

    def arrays(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=[self.rows, self.width]).astype(np.float32)
        return x, draw.integers(0, 10, [self.rows]).astype(np.int32)


class Encoder(Model):
    """Four blocks of a Transformer encoder on random tokens."""

    def build(self, keras, dropout=0.0):
        layers = keras.layers
        tokens = layers.Input((64,), dtype="int32")
        x = layers.Embedding(8192, 128)(tokens)
        for _ in range(4):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
            y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(128)(y)])
        return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))

    def arrays(self):
        draw = np.random.default_rng(0)
        x = draw.integers(0, 8192, [4096, 64]).astype(np.int32)
        return x, draw.integers(0, 10, [4096]).astype(np.int32)


MODELS = {
    "empty": Empty(batch=64, has_accuracy=False),
    "mnist64": Mnist(batch=64),
    "mnist256": Mnist(batch=256, steps_per_loop=100 if GPU else 25),
    "encoder128": Encoder(batch=32, steps_per_loop=5),
    # Of benchmarks.gpu.
    "resnet50_float16": ResNet50(batch=128, steps_per_loop=50, precision="float16"),
    "resnet50_bfloat16": ResNet50(batch=128, steps_per_loop=50, precision="bfloat16"),
    "resnet50_small": ResNet50(batch=2, steps_per_loop=1, precision="bfloat16", size=32),
}


def _cross_entropy(keras, labels, outputs):
    outputs = tf.cast(outputs, tf.float32)  # under mixed precision they have 16 bits
    losses = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
    return losses if losses.shape.rank == 1 else tf.reduce_mean(losses, axis=1)  # of the tokens
