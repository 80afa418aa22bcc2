"""Objects of Keras 3 are recognized by their class, wherever they reach a trainer."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.step import keras_version
from tests import child, reference_model

keras = pytest.importorskip("keras", "3", reason="Keras 3 is not installed")
FIX = "ctl requires tf_keras, so write `import tf_keras` instead of `import keras`, and"


class Subclass(keras.Model):
    pass


class Holding(tf_keras.Model):
    """A model of tf_keras with a layer of Keras 3, whose variables it does not see."""

    def __init__(self):
        super().__init__()
        self.layers_of_both = [tf_keras.layers.Dense(3), keras.layers.Dense(3)]

    def call(self, inputs):
        return self.layers_of_both[1](self.layers_of_both[0](inputs["x"]))


def test_classes_and_their_subclasses_are_recognized():
    assert keras_version.is_keras3(keras.layers.Dense(1))
    assert keras_version.is_keras3(Subclass())
    assert keras_version.is_keras3(keras.optimizers.SGD())
    for value in (tf_keras.layers.Dense(1), tf_keras.Sequential(), tf_keras.optimizers.SGD(), "a"):
        assert not keras_version.is_keras3(value)


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
        ({"model_factory": keras.Sequential}, "build_model returned a Sequential of Keras 3: "),
        ({"model_factory": Subclass}, "build_model returned a Subclass of Keras 3: "),
        (
            {"model_factory": Holding},
            "build_model returned a Holding that contains a Dense of Keras 3: ",
        ),
        (
            {"model_factory": lambda: tf_keras.Sequential([keras.layers.Dense(1)])},
            r"a Dense of Keras 3 is used with tf_keras \(TypeError: The added layer must .*\): ",
        ),
        (
            {"model_factory": functional_of_both},
            r"a KerasTensor of Keras 3 is used with tf_keras \(.*\): ",
        ),
        ({"metric_factory": keras.metrics.MeanSquaredError}, "Metric 'm' is a MeanSquaredError of"),
        ({"metric_factory": keras.losses.MeanSquaredError}, "Metric 'm' is a MeanSquaredError of"),
        ({"optimizer": keras.optimizers.SGD}, "The optimizer is a SGD of Keras 3: "),
        (
            {
                "optimizer": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
                    keras.optimizers.SGD()
                )
            },
            r'a SGD of Keras 3 is used with tf_keras \(TypeError: "inner_optimizer" must be .*\): ',
        ),
    ],
)
def test_object_of_keras_3_is_rejected_when_the_trainer_is_built(attributes, message):
    with pytest.raises(ctl.UsageError, match=message) as error:
        make(**attributes)
    assert FIX in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (keras.optimizers.SGD, "self.mine is a SGD of Keras 3"),
        (lambda: [keras.losses.MeanSquaredError()], "self.mine is a MeanSquaredError of Keras 3"),
        (lambda: {"critic": keras.Sequential()}, "self.mine is a Sequential of Keras 3"),
        (Holding, "self.mine is a Holding that contains a Dense of Keras 3"),
    ],
)
def test_object_of_keras_3_in_an_attribute_is_rejected_before_the_first_step(value, message):
    trainer = make()
    trainer.mine = value()
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 0


def test_optimizer_of_keras_3_that_is_passed_to_minimize_is_rejected():
    optimizer = keras.optimizers.SGD()

    class Own(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return self.minimize(batch, lambda rows: rows["weight"], optimizer=optimizer)

    trainer = reference_model.make_trainer(testing.make_strategy(2), 8, cls=Own)
    with pytest.raises(ctl.UsageError, match="The optimizer is a SGD of Keras 3: "):
        trainer.train(tf.constant(1))


def test_other_errors_keep_their_type():
    with pytest.raises(ZeroDivisionError), keras_version.report_keras3():
        raise ZeroDivisionError
    with pytest.raises(ctl.UsageError, match="mine"), keras_version.report_keras3():
        layer = keras.layers.Dense(1)
        raise ctl.UsageError(f"mine {layer.name}")


def test_variables_that_an_optimizer_in_a_model_creates_later_are_saved():
    class Owner(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.own_optimizer = tf_keras.optimizers.Adam()

    model = Owner()
    keras_version.check_tracked(model, "build_model returned")
    model.own_optimizer.build([tf.Variable(1.0)])
    children = tf.train.TrackableView.children(model.own_optimizer)
    assert len(children["_variables"]) == 3  # iterations and two slot variables


# The model, loss, metric and optimizer are those of TensorFlow's tutorial "Custom training with
# tf.distribute.Strategy" and of Keras' example "Simple MNIST convnet", unchanged.
PASTED = """
import ctl
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

num_classes = 10
input_shape = (28, 28, 1)

def create_model():
  regularizer = tf.keras.regularizers.L2(1e-5)
  model = tf.keras.Sequential([
      tf.keras.layers.Conv2D(32, 3,
                             activation='relu',
                             kernel_regularizer=regularizer),
      tf.keras.layers.MaxPooling2D(),
      tf.keras.layers.Conv2D(64, 3,
                             activation='relu',
                             kernel_regularizer=regularizer),
      tf.keras.layers.MaxPooling2D(),
      tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(64,
                            activation='relu',
                            kernel_regularizer=regularizer),
      tf.keras.layers.Dense(10,
                            kernel_regularizer=regularizer)
    ])

  return model

def example_model():
    return keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)

class Trainer(ctl.StandardTrainer):
    logits = True

    def build_model(self):
        return create_model() if self.logits else example_model()

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        images = draw.random((8, 28, 28, 1), dtype=np.float32)
        return ctl.data.arrays({"x": images, "label": draw.integers(0, 10, 8)})

    def per_example_loss(self, batch, outputs):
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=self.logits,
            reduction=tf.keras.losses.Reduction.NONE)
        return loss_object(batch["label"], outputs)

    def build_metrics(self):
        return {"accuracy": tf.keras.metrics.SparseCategoricalAccuracy(name='train_accuracy')}

class Example(Trainer):
    logits = False

for cls in (Trainer, Example):
    trainer = cls(
        global_batch_size=8,
        optimizer=lambda: tf.keras.optimizers.Adam(learning_rate=0.001),
    )
    before = trainer.model.get_weights()
    results = trainer.train(tf.constant(2))
    moved = [np.abs(a - b).max() for a, b in zip(before, trainer.model.get_weights())]
    print(cls.__name__, sorted(results), min(moved) > 0)
"""


def test_layers_of_tensorflow_are_those_of_tf_keras():
    assert tf.keras.layers.Dense is tf_keras.layers.Dense


@pytest.mark.slow
def test_model_code_of_tutorials_trains_unchanged():
    done = child.run(["-c", PASTED])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Trainer ['accuracy', 'loss'] True",
        "Example ['accuracy', 'loss'] True",
    ]


def test_choice_of_the_user_is_kept():
    done = child.run(["-c", "import os, ctl; print(os.environ['TF_USE_LEGACY_KERAS'])"],
                     TF_USE_LEGACY_KERAS="0")  # fmt: skip
    assert done.stdout.strip() == "0"
