"""The cases with Keras 3: their modules are imported again, with `keras` in the place of tf_keras."""

from collections.abc import Sequence
import importlib
import sys
import types
from typing import Any
from unittest import mock

import keras

import ctl
import tests.users_code
from tests.users_code import running

_PREFIX = "tests.users_code."


def _import(*names: str) -> Sequence[Any]:
    """Imports modules of the cases, and those that they import, for Keras 3."""
    assert ctl.StandardTrainer and running  # import tf_keras themselves
    package = types.ModuleType("tf_keras")
    vars(package).update({k: v for k, v in vars(keras).items() if not k.startswith("__")})
    attributes = dict(vars(tests.users_code))
    others = {k: v for k, v in sys.modules.items() if not k.startswith(_PREFIX)}
    # `from tests.users_code import x` takes an attribute before it imports a module.
    for name in [k for k, v in attributes.items() if isinstance(v, types.ModuleType)]:
        delattr(tests.users_code, name)
    try:
        with mock.patch.dict(sys.modules, others | {"tf_keras": package}, clear=True):
            return [importlib.import_module(_PREFIX + name) for name in names]
    finally:
        vars(tests.users_code).clear()
        vars(tests.users_code).update(attributes)


table, examples, generative, noise, normalization, sequences = _import(
    "table", "examples", "generative", "noise", "normalization", "sequences"
)
assert table.normalization is normalization  # and not the module with tf_keras


class Sampling(keras.layers.Layer):
    """As in the guide of Keras 3: with a generator that the layer holds."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        shape = keras.ops.shape(z_mean)
        noise_of_rows = keras.random.normal(shape, seed=self.seed_generator, dtype=z_mean.dtype)
        return z_mean + keras.ops.exp(0.5 * z_log_var) * noise_of_rows


class VariationalAutoencoder(generative.VariationalAutoencoder):
    sampling = Sampling


class LambdaDropout(examples.Case):
    """By a function of Keras with its global generator."""

    def build_model(self):
        return examples.dense(keras.layers.Lambda(lambda x: keras.random.dropout(x, 0.4)))


class FoldedDropout(sequences.FoldedDropout):
    def build_model(self):
        series = keras.Input((sequences.TOKENS, 4))
        folded = keras.ops.reshape(keras.layers.Dense(3)(series), [-1, 3])
        dropped = keras.layers.Dropout(0.5)(folded)
        last = keras.ops.reshape(dropped, [-1, sequences.TOKENS * 3])
        return keras.Model(series, keras.layers.Dense(sequences.CLASSES)(last))


class SyncBatchNormalization(normalization.SyncBatchNormalization):
    def build_model(self):
        return examples.convolutional(keras.layers.BatchNormalization(synchronized=True))


_OWN = {
    row.name: row
    for row in (
        table.right("variational autoencoder", "Keras: vae", VariationalAutoencoder, plain=False),
        table.right("RandomFlip", "TF: images", noise.RandomFlipCase, plain=False),
        table.right("folded axes and dropout", "Keras", FoldedDropout, plain=False),
        table.right("SyncBatchNormalization", "Keras", SyncBatchNormalization, plain=False),
        table.Row("Lambda with backend.dropout", "Keras FAQ", LambdaDropout, ("ctl.random",)),
    )
}
ROWS = [_OWN.get(row.name, row) for row in table.ROWS]
