"""The small trainer that ctl.testing provides."""

import numpy as np
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.testing import tiny


def test_examples_are_distinct():
    examples = tiny.examples(24)
    assert examples["x"].shape == (24, 4)
    assert len(np.unique(examples["x"], axis=0)) == 24
    assert set(examples["label"]) == {0, 1, 2}
    np.testing.assert_array_equal(tiny.examples(24)["x"], examples["x"])


def test_tiny_trainer_learns():
    options = dict(optimizer=lambda: tf_keras.optimizers.SGD(0.5), precision="float64")
    trainer = testing.tiny_trainer(testing.make_strategy(2), global_batch_size=6, **options)
    assert isinstance(trainer, testing.TinyTrainer)
    assert (trainer.global_batch_size, trainer.options.precision) == (6, "float64")
    first, _, last = (trainer.train(tf.constant(20)) for _ in range(3))
    assert last["loss"] < 0.5 * first["loss"]
    assert last["accuracy"] > 0.9
