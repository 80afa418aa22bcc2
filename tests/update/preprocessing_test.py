"""A preprocess that changes the number of rows is rejected, also if shapes are not static."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.keras import models
from ctl.testing import tiny
from ctl.update.preprocessing import default_sample_weight, find_second_scaling, select_inputs
from tests.support import reference_model


class Drops(tiny.TinyTrainer):
    def preprocess(self, batch):
        return {name: rows[1:] for name, rows in super().preprocess(batch).items()}


def test_preprocess_that_changes_the_number_of_rows_is_rejected():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=Drops)
    for run in (trainer.train, ctl.StandardEvaluator(trainer).evaluate):
        message = "preprocess returned 7 rows for a batch of 8: return"
        with pytest.raises(ctl.UsageError, match=message):
            run(tf.constant(1))
    # With rows that are not static.
    dataset = tf.data.Dataset.from_tensor_slices(tiny.examples(16)).batch(8)
    trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ctl.UsageError, match="preprocess returned another number of rows"):
        trainer.train(tf.constant(1))


X = tf_keras.Input([1], name="x")
Y = tf_keras.Input([1], name="y")


class Subclassed(tf_keras.Model):
    def call(self, inputs):
        return tf_keras.layers.add([*inputs.values()]) if isinstance(inputs, dict) else inputs


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: tf_keras.Model({"x": X}, X), {"x"}),
        (lambda: tf_keras.Model(X, X), {"x"}),
        (lambda: tf_keras.Model([X, Y], X), {"x", "y"}),
        (lambda: tf_keras.Model({"x": Y}, Y), {"x"}),  # the key counts, not the layer's name
        (lambda: tf_keras.Model({"other": X}, X), {"x", "y", "unused"}),
        (lambda: tf_keras.Sequential([tf_keras.layers.Dense(1)]), {"x", "y", "unused"}),
        (Subclassed, {"x", "y", "unused"}),
    ],
)
def test_functional_model_gets_the_features_that_it_has_inputs_for(model, names):
    features = {"x": tf.ones([2, 1]), "y": tf.ones([2, 1]), "unused": tf.ones([2, 1])}
    model = model()
    if isinstance(model, Subclassed):
        model(X)  # a symbolic call sets the attribute `input`
    assert select_inputs(model, features).keys() == names


def test_weight_without_a_label_may_be_a_feature_unless_a_hook_tells():
    class Weighted(tiny.TinyTrainer):
        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": tiny.examples(8)["x"], "weight": [1.0] * 8})

    class Made(Weighted):
        def preprocess(self, batch):
            return batch

    arguments = {"global_batch_size": 8, "optimizer": tf_keras.optimizers.SGD}
    with pytest.raises(ctl.UsageError, match="feature or the weight"):
        Weighted(**arguments)
    Made(**arguments)
    for made_by in ("label", "segment_ids"):  # ctl.data.packed makes segment_ids and the weight
        assert default_sample_weight({"weight": 2, made_by: 3}) == 2


def normalization(package, mean, shape=(8, 8, 3)):
    layer = package.layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(mean, 0.1, (4, *shape)).astype("float32"))
    return layer


def nested(package, *layers):
    inputs = package.Input((8, 8, 3))
    inner = package.Sequential([*layers, package.layers.Flatten()])
    return package.Model(inputs, package.layers.Dense(2)(inner(inputs)))


@pytest.mark.parametrize("package", [tf_keras, keras], ids=["tf_keras", "keras"])
def test_layer_that_scales_images_again_is_named(package):
    layers = package.layers
    rescaling = layers.Rescaling(1 / 127.5, offset=-1)
    cases = [
        (nested(package, normalization(package, 120.0)), "normalization"),
        (package.Sequential([layers.Rescaling(1 / 255), layers.Flatten()]), "rescaling"),
        (nested(package, rescaling), "rescaling"),
        (nested(package, layers.Rescaling(255.0), rescaling), ""),
        (nested(package, layers.Rescaling(2.0, offset=-1)), ""),
        (nested(package, normalization(package, 0.5)), ""),
        (nested(package, layers.Normalization()), ""),
        (package.Sequential([normalization(package, 40.0, (3,))]), ""),  # not of images
        (nested(package), ""),
    ]
    for model, expected in cases:
        layer = find_second_scaling(models.adapt(model)._flatten_layers())
        assert layer.rstrip("_0123456789") == expected, (model.layers, layer)
