"""Objects of Keras 3 that cannot take part in a step are rejected wherever they reach a trainer."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.explanations import explained
from ctl.keras.keras3 import detection
from tests.support import reference_model

keras = pytest.importorskip("keras", "3", reason="Keras 3 is not installed")
FIX = "a model has layers of one of the two packages, so import either keras or tf_keras."


class Holding(tf_keras.Model):
    """A model of tf_keras with a layer of Keras 3, whose variables it does not see."""

    def __init__(self):
        super().__init__()
        self.layers_of_both = [tf_keras.layers.Dense(3), keras.layers.Dense(3)]

    def call(self, inputs):
        return self.layers_of_both[1](self.layers_of_both[0](inputs["x"]))


class Chosen(reference_model.ReferenceTrainer):
    model_factory = None
    metric_factory = None
    attribute = None

    def build_model(self):
        return self.model_factory() if self.model_factory else super().build_model()

    def build_metrics(self):
        return {"m": self.metric_factory()} if self.metric_factory else super().build_metrics()


def make(optimizer=None, **attributes):
    cls = type("Chosen", (Chosen,), {name: staticmethod(f) for name, f in attributes.items()})
    return reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls, optimizer=optimizer)


def functional_of_both():
    return tf_keras.layers.Dense(1)(keras.Input([3]))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"model_factory": Holding}, "build_model returned a Holding that contains a Dense of"),
        (
            {"model_factory": lambda: tf_keras.Sequential([keras.layers.Dense(1)])},
            r"a Dense of Keras 3 is used with tf_keras \(TypeError: The added layer must .*\): ",
        ),
        ({"model_factory": functional_of_both}, r"a KerasTensor of Keras 3 is used with tf_keras"),
        (
            {"model_factory": lambda: keras.Sequential([tf_keras.layers.Dense(1)])},
            r"a Dense of tf_keras is used with Keras 3 \(.*\): ",
        ),
        ({"metric_factory": keras.losses.MeanSquaredError}, "Metric 'm' is a MeanSquaredError of"),
    ],
)
def test_object_of_keras_3_is_rejected_when_the_trainer_is_built(attributes, message):
    with pytest.raises(ctl.UsageError, match=message) as error:
        make(**attributes)
    assert FIX in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: [keras.metrics.Mean()], "self.mine is a Mean of Keras 3: write"),
        (lambda: keras.Variable(1.0), "self.mine is a Variable of Keras 3: use tf.Variable, or"),
    ],
)
def test_object_of_keras_3_in_an_attribute_is_rejected_before_the_first_step(value, message):
    trainer = make()
    trainer.mine = value()
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 0


def test_layer_of_tf_keras_that_uses_tf_keras_inside_is_built():
    layer = tf_keras.layers.SpectralNormalization(tf_keras.layers.Dense(1))
    assert layer(tf.ones([2, 3]), training=True).shape == [2, 1]


def test_other_errors_keep_their_type():
    with pytest.raises(ZeroDivisionError), explained():
        raise ZeroDivisionError
    with pytest.raises(ctl.UsageError, match="mine"), explained():
        layer = keras.layers.Dense(1)
        raise ctl.UsageError(f"mine {layer.name}")


def test_variables_that_an_optimizer_in_a_model_creates_later_are_saved():
    class Owner(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.own_optimizer = tf_keras.optimizers.Adam()

    model = Owner()
    detection.check(model, "build_model returned")
    model.own_optimizer.build([tf.Variable(1.0)])
    children = tf.train.TrackableView.children(model.own_optimizer)
    assert len(children["_variables"]) == 3  # iterations and two slot variables


def test_model_decides_which_keras_is_trained():
    """`tf.keras` is what TF_USE_LEGACY_KERAS makes of it; ctl does not set the variable."""

    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs["x"])

    assert tf.keras.layers.Dense is keras.layers.Dense
    assert make(model_factory=Own).train(tf.constant(1))["loss"] > 0
