"""The ResNet of experiments/resnet50.py, on small images."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.replica.memory import recompute
from experiments.trainers import resnet
from tests import one_batch


@pytest.mark.slow
@pytest.mark.long
def test_recomputed_blocks_give_the_same_gradients_and_statistics(monkeypatch):
    monkeypatch.setattr(resnet, "_IMAGE", (32, 32, 3))
    monkeypatch.setattr(resnet, "_CLASSES", 10)

    def train(switch):
        tf_keras.backend.reset_uids()
        tf_keras.utils.set_random_seed(1)
        trainer = resnet.ResNetTrainer(
            strategy=one_batch.strategy(1),
            global_batch_size=4,
            optimizer=lambda: tf_keras.optimizers.SGD(0.01),
            options=ctl.TrainerOptions(
                precision="float64", model={"recompute": switch, "sync_batch_norm": True}
            ),
        )
        with recompute.detect_use() as used:
            trainer.train(tf.constant(1))
            assert used() == bool(switch)
        return {variable.name: variable.numpy() for variable in trainer.model.variables}

    expected, actual = train(""), train("blocks")
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        atol = 0 if "moving" in name else 1e-12
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=atol, err_msg=name)
