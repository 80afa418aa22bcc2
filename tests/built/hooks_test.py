"""Functions with other arguments than ctl passes are one line, also in a script."""

import subprocess
import sys

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.built import hooks
from ctl.errors import UsageError
from tests.built.bad_rows_test import Classifier
from tests.support import child, one_batch


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"per_example_loss": lambda self, batch: 0}, "per_example_loss cannot be called with"),
        (
            {"per_example_loss": lambda self, outputs, batch: 0},
            "per_example_loss takes (outputs, batch), but is called with (batch, outputs)",
        ),
        (
            {"forward": lambda self, training, batch: 0},
            "forward takes (training, batch), but is called with (batch, training)",
        ),
        ({"sample_weight": lambda self, batch: batch["x"][:, 0] ** 2}, ""),
        ({"per_example_loss": lambda self, rows, logits: logits[:, 0] ** 2}, ""),
    ],
)
def test_methods(methods, message):
    cls = type("Changed", (Classifier,), methods)
    if not message:
        one_batch.make(cls, 8, 1)
        return
    with pytest.raises(UsageError) as error:
        one_batch.make(cls, 8, 1)
    assert str(error.value).startswith(f"Changed.{message}") and "\n" not in str(error.value)


def step(loss=lambda batch, outputs: outputs[:, 0], **functions):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    return ctl.Step(model, tf_keras.optimizers.SGD(), loss, global_batch_size=2, **functions)


def test_functions_of_a_step():
    with pytest.raises(UsageError, match=r"loss_fn .*outputs, batch"):
        step(lambda outputs, batch: outputs)
    with pytest.raises(UsageError, match=r"forward .*batch, training"):
        step(forward=lambda batch: batch)
    step(tf_keras.losses.mean_squared_error)


def test_names_of_features_are_strings():
    x = tf.zeros([2, 3])
    message = "A feature has the name 0, but names must be strings"
    with pytest.raises(UsageError, match=message):
        step()({0: x, "label": x})
    for make in (ctl.data.arrays, tf.data.Dataset.from_tensor_slices):
        cls = type("Numbered", (Classifier,), {"build_dataset": lambda *_, m=make: m({0: x, 1: x})})
        with pytest.raises(UsageError, match=message):
            one_batch.make(cls, 2, 1)


@pytest.mark.slow
def test_disabled_eager_execution_is_one_line():
    code = (
        "import tensorflow as tf, tf_keras, ctl\n"
        "tf.compat.v1.disable_eager_execution()\n"
        "model = tf_keras.Sequential([tf_keras.layers.Dense(1)])\n"
        "ctl.Step(model, tf_keras.optimizers.SGD(), lambda b, o: o, global_batch_size=2)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child.environment()
    )
    assert "UsageError: TensorFlow's eager execution is disabled" in result.stderr


class OwnGradients(tf_keras.optimizers.SGD):
    def compute_gradients(self, loss, var_list, tape=None):
        return []


class OwnUpdate(tf_keras.optimizers.SGD):
    def apply_gradients(self, *args, **kwargs):
        return super().apply_gradients(*args, **kwargs)


def test_optimizer_that_overrides_what_nothing_calls_is_rejected():
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    with pytest.raises(UsageError, match=r"OwnGradients .*compute_gradients"):
        ctl.Step(model, OwnGradients(), lambda b, o: o[:, 0], global_batch_size=2)
    changed = tf_keras.optimizers.SGD()
    changed.compute_gradients = lambda loss, var_list, tape=None: []
    with pytest.raises(UsageError, match="SGD overrides compute_gradients"):
        ctl.Step(model, changed, lambda b, o: o[:, 0], global_batch_size=2)
    ctl.Step(model, OwnUpdate(), lambda b, o: o[:, 0], global_batch_size=2)


class OwnStep(tf_keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(tf_keras.Sequential):
    def compute_loss(self, x=None, y=None):
        return y


def changed(layers):
    """Makes a model whose object has a method of its own."""
    model = tf_keras.Sequential(layers)
    model.train_step = lambda data: {}
    return model


@pytest.mark.parametrize(
    ("cls", "compiled", "line"),
    [
        (OwnStep, False, "OwnStep overrides train_step, which ctl does not call"),
        (OwnLoss, False, ""),  # this file calls it below
        (changed, False, "Sequential overrides train_step, which ctl does not call"),
        (tf_keras.Sequential, True, "The model was compiled with an optimizer and a loss"),
        (tf_keras.Sequential, False, ""),
    ],
)
def test_training_that_a_model_defines_is_named(cls, compiled, line, caplog):
    model = cls([tf_keras.layers.Dense(1)])
    if compiled:
        model.compile(optimizer="sgd", loss="mse")

    def loss(batch, outputs):
        return model.compute_loss(None, outputs)[:, 0] if cls is OwnLoss else outputs[:, 0]

    ctl.Step(model, tf_keras.optimizers.SGD(), loss, global_batch_size=2)({"x": tf.ones([2, 3])})
    assert (line in caplog.text) if line else not caplog.records


class KerasStep(Classifier):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data)
        self.optimizer.minimize(loss, self.model.trainable_variables, tape=tape)


def test_step_in_the_form_of_keras_is_rejected():
    with pytest.raises(UsageError, match=r"KerasStep\.train_step .*Keras"):
        one_batch.make(KerasStep, 8, 1)


class Misspelt(Classifier):
    def build_metric(self):
        return {"mae": tf_keras.metrics.MeanAbsoluteError()}


class Helper(Classifier):
    """Has methods whose names are close to hooks, and which something calls."""

    def preprocessed(self, batch):
        return batch

    def preprocess(self, batch):
        return batch

    def build_parts_(self):
        return []

    def build_parts(self):
        return self.build_parts_()

    def sample_weights(self):  # takes no batch
        return {}


@pytest.mark.parametrize(
    ("cls", "lines"),
    [(Misspelt, ["Misspelt.build_" "metric: did you mean build_metrics,"]), (Helper, [])],
)  # fmt: skip
def test_method_with_almost_the_name_of_a_hook_is_named(cls, lines, caplog):
    hooks.check_methods(cls, ctl.StandardTrainer)
    assert [m.replace("Nothing calls ", "")[: len(lines[0])] for m in caplog.messages] == lines
