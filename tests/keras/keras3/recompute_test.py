"""Layers of Keras 3 can be recomputed, with the gradient and the draws of the first pass."""

import keras
import pytest

import ctl
from tests.keras.keras3 import twins
from tests.keras.keras3.twins import difference, make_trainer, train


class Block(keras.layers.Layer):
    """Its inner layers inherit training=True and the dtype from the call of the model."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.1))
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.4)

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)
        super().build(shape)

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.sum(self.dense.kernel**2))
        return self.drop(self.norm(self.dense(inputs)))


@pytest.mark.slow
def test_recomputed_layer_computes_the_same_update():
    def run(wrap):
        def make(k):
            return k.Sequential([k.Input((6,)), wrap(Block()), k.layers.Dense(4)])

        cls = type("Blocks", (twins.Twin,), {"shape": (6,)})
        sync = {"sync_batch_norm": True}
        trainer = make_trainer(
            cls=cls, make=make, batch=8, replicas=2, model=sync, seed=1, precision="bfloat16"
        )
        return train(trainer, 3)[1]

    assert difference(run(ctl.recompute), run(lambda layer: layer)) < 1e-6
