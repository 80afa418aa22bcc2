"""Objects that are replaced between two steps are used, or named in one line."""

import dataclasses
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import UsageError
from tests.support import one_batch
from tests.support.checks import close

X = np.random.RandomState(0).randn(16, 3)
EXAMPLES = {"x": X, "label": X.sum(axis=1, keepdims=True) ** 2}
SCHEDULE = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


def squares(batch, outputs):
    return tf.reduce_sum((batch["label"] - outputs) ** 2, axis=1)


class Trainer(one_batch.Trainer):
    EXAMPLES = EXAMPLES

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def per_example_loss(self, batch, outputs):
        return squares(batch, outputs)


def make_trainer(optimizer=None):
    trainer = Trainer(
        strategy=one_batch.strategy(1),
        global_batch_size=8,
        optimizer=optimizer or (lambda: tf_keras.optimizers.SGD(0.01)),
        options=ctl.TrainerOptions(precision="float64"),
    )
    return trainer, lambda: trainer.train(tf.constant(1))


def make_step(optimizer=None):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, dtype="float64")])
    model.build((None, 3))
    optimizer = optimizer or tf_keras.optimizers.SGD(0.01)
    step = ctl.Step(model, optimizer, squares, global_batch_size=16, precision="float64")
    batch = {name: tf.constant(values) for name, values in EXAMPLES.items()}
    return step, lambda: step(batch)


@pytest.mark.parametrize("make", [make_trainer, make_step])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda owner: setattr(owner, "model", Trainer.build_model(owner)),
            "The model was replaced after a step",
        ),
        (
            lambda owner: setattr(owner, "strategy", one_batch.strategy(2)),
            "strategy was replaced after the step was built",
        ),
        (
            lambda owner: setattr(owner, "options", dataclasses.replace(owner.options, seed=7)),
            "options was replaced after the step was built",
        ),
        (lambda owner: setattr(owner, "global_batch_size", 4), r"global_batch_size was (8|16)"),
        (
            lambda owner: setattr(owner.optimizer, "learning_rate", SCHEDULE),
            "learning_rate of the optimizer was set to a schedule",
        ),
    ],
)
def test_what_the_step_cannot_use_is_one_line(make, change, message):
    owner, step = make()
    step()
    change(owner)
    with pytest.raises(UsageError, match=message):
        step()


@pytest.mark.parametrize(
    ("make", "name"), [(make_trainer, "per_example_loss"), (make_step, "loss_fn")]
)
def test_another_loss_is_used_from_the_next_step_on(make, name):
    owner, step = make()
    step()
    setattr(owner, name, lambda batch, outputs: 0.0 * squares(batch, outputs))
    before = owner.model.get_weights()[0]
    assert float(step()["loss"] if make is make_trainer else step().loss) == 0
    np.testing.assert_array_equal(owner.model.get_weights()[0], before)


@pytest.mark.parametrize("make", [make_trainer, make_step])
def test_another_momentum_is_used_from_the_next_step_on(make):
    """With rate 0 the weights move by the velocity alone, times the momentum."""
    owner, step = make(tf_keras.optimizers.SGD(0.01, momentum=0.5))
    step()
    owner.optimizer.learning_rate = 0.0
    owner.optimizer.momentum = 0.0
    before = owner.model.get_weights()[0]
    step()
    np.testing.assert_array_equal(owner.model.get_weights()[0], before)


def test_other_parts_of_a_step_are_one_line():
    owner, step = make_step()
    step()
    owner.parts = [ctl.Part()]
    with pytest.raises(UsageError, match="parts was replaced after the step was built"):
        step()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"scale": 1.0}, lambda value: value.update(scale=0.0)),
        ([1.0], lambda value: value.__setitem__(0, 0.0)),
        (types.SimpleNamespace(scale=1.0), lambda value: setattr(value, "scale", 0.0)),
    ],
)
def test_another_number_in_a_container_is_used_from_the_next_loop_on(value, change):
    class Scaled(Trainer):
        def build_model(self):
            self.held = value
            return super().build_model()

        def per_example_loss(self, batch, outputs):
            held = self.held
            if isinstance(held, types.SimpleNamespace):
                held = vars(held)
            (scale,) = held.values() if isinstance(held, dict) else held
            return super().per_example_loss(batch, outputs) * scale

    trainer = one_batch.make(Scaled, 8, 1)
    trainer.train(tf.constant(1))
    change(trainer.held)
    assert float(trainer.train(tf.constant(1))["loss"]) == 0


class ScaledDense(tf_keras.layers.Dense):
    scale = 1.0

    def __init__(self, units, **options):
        super().__init__(units, **options)
        self.factor = 1.0

    def call(self, inputs):
        return super().call(inputs) * self.scale * self.factor


@pytest.mark.parametrize("make", [make_trainer, make_step])
@pytest.mark.parametrize("name", ["activation", "factor", "scale"])
def test_another_attribute_of_a_layer_is_used_from_the_next_step_on(make, name, monkeypatch):
    monkeypatch.setattr(tf_keras.layers, "Dense", ScaledDense)
    owner, step = make()
    step()
    before = owner.model.get_weights()
    setattr(owner.model.layers[0], name, tf.zeros_like if name == "activation" else 0.0)
    step()
    close(before, owner.model.get_weights())


class Scaled(Trainer):
    """Multiplies the loss by a number, which a method of its own reads, and counts its loops."""

    factor, loops, traces = 1.0, 0, 0

    def scaled(self, losses):
        return tf.map_fn(lambda loss: loss * self.factor, losses)

    def per_example_loss(self, batch, outputs):
        type(self).traces += 1
        return self.scaled(super().per_example_loss(batch, outputs))

    def train_loop_begin(self):
        self.loops += 1
        super().train_loop_begin()


class Decaying(Scaled):
    """Changes the number, and freezes a layer, at the end of the first loop."""

    def train_loop_end(self):
        results = super().train_loop_end()
        self.factor, self.model.layers[0].trainable = 1e-9, False
        return results


def test_what_the_end_of_a_loop_changes_is_used_from_the_next_loop_on():
    trainer = one_batch.make(Decaying, 8, 1)
    trainer.train(tf.constant(1))
    before = trainer.model.get_weights()[0]
    assert float(trainer.train(tf.constant(1))["loss"]) < 1e-5
    np.testing.assert_array_equal(trainer.model.get_weights()[0], before)


class Inherited(Scaled):
    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs)


def test_another_number_of_the_trainer_is_used_from_the_next_loop_on():
    trainer = one_batch.make(Inherited, 8, 1)
    trainer.train(tf.constant(1))
    traces = trainer.traces
    trainer.train(tf.constant(1))
    assert (trainer.loops, trainer.traces) == (2, traces)  # no hook reads the count
    trainer.factor = 0.0
    assert float(trainer.train(tf.constant(1))["loss"]) == 0
    assert trainer.traces > traces


@pytest.mark.parametrize("make", [make_trainer, make_step])
def test_a_penalty_that_is_added_later_is_used_from_the_next_step_on(make):
    owner, step = make()
    step()
    value = lambda results: float(results["loss"] if make is make_trainer else results.loss)  # noqa: E731
    before = value(step())
    owner.model.add_loss(lambda: tf.constant(1e6, tf.float64))
    assert value(step()) > before + 9e5


def test_optimizer_of_keras_3_shows_and_sets_what_is_trained_with():
    optimizer = keras.optimizers.SGD(0.01)
    step, run = make_step(optimizer)
    run()
    before = step.model.get_weights()[0]
    optimizer.learning_rate = 0.0
    run()
    np.testing.assert_array_equal(step.model.get_weights()[0], before)
    assert (int(optimizer.iterations), float(step.optimizer.learning_rate)) == (2, 0.0)
    assert isinstance(optimizer, keras.optimizers.SGD)


class Second(Trainer):
    """Trains a second model by an optimizer of its own."""

    package = keras

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.second = tf_keras.Sequential(
                [tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=(3,))]
            )
            self.second_optimizer = self.package.optimizers.Adam(0.01)

    def replica_step(self, batch):
        self.minimize(
            batch,
            lambda rows: squares(rows, self.second(rows["x"])),
            variables=self.second.trainable_variables,
            optimizer=self.second_optimizer,
        )
        return super().replica_step(batch)


def test_second_optimizer_of_keras_3_is_converted_as_the_first(tmp_path):
    weights = []
    for package in (keras, tf_keras):
        cls = type("Second", (Second,), {"package": package})
        trainer = one_batch.make(cls, 6, 2)
        trainer.train(tf.constant(3))
        weights.append(trainer.second.get_weights()[0])
        assert trainer.second_optimizer.iterations.numpy() == 3
        path = tf.train.Checkpoint(**trainer.checkpoint_items()).write(str(tmp_path / "ckpt"))
        saved = [name for name, _ in tf.train.list_variables(path)]
        assert sum(name.startswith("second_optimizer/") for name in saved) >= 5
    np.testing.assert_allclose(*weights, rtol=0, atol=1e-8)  # a rate of float32


def make_regularized(library):
    """A layer with a penalty, and a step that returns its loss and changes nothing."""
    penalty = library.regularizers.L2(0.01)
    dense = library.layers.Dense(1, kernel_regularizer=penalty, dtype="float64")
    model = library.Sequential([dense])
    model.build((None, 3))
    model.set_weights([np.ones([3, 1]), np.zeros(1)])
    optimizer = tf_keras.optimizers.SGD(0.0)
    step = ctl.Step(model, optimizer, squares, global_batch_size=16, precision="float64")
    batch = {name: tf.constant(values) for name, values in EXAMPLES.items()}
    return dense, lambda: float(step(batch).loss)


def set_number(layer):
    layer.kernel_regularizer.l2 = 0.5


def set_activity(layer):
    layer.activity_regularizer = tf_keras.regularizers.L2(0.5)


def set_of_variable(layer):
    layer.kernel.regularizer = keras.regularizers.L2(0.5)


@pytest.mark.parametrize(
    ("library", "change"),
    [
        (tf_keras, set_number),
        (tf_keras, set_activity),
        (keras, set_number),
        (keras, set_of_variable),
    ],
)
def test_regularizer_that_is_changed_after_a_step_is_used(library, change):
    layer, step = make_regularized(library)
    before = step()
    change(layer)
    assert step() > before + 0.1


@pytest.mark.parametrize("library", [tf_keras, keras])
def test_regularizer_that_is_replaced_after_a_step_has_no_effect_in_keras(library):
    layer, step = make_regularized(library)
    step()
    layer.kernel_regularizer = library.regularizers.L2(0.5)
    with pytest.raises(UsageError, match=r"^kernel_regularizer of a layer was replaced .*l2"):
        step()
