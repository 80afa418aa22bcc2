"""The optimizer and schedule that a config defines, compared with numbers computed by hand."""

import math

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import optimizers

CLASSES = tf_keras.optimizers


def section(**changes):
    """Returns the section `optimizer` of a config."""
    return ctl.config(optimizer=changes).optimizer


def build(steps=1000, global_batch_size=64, **changes):
    """Makes the optimizer that a section defines."""
    return optimizers.factory(
        section(**changes), global_batch_size=global_batch_size, steps=steps
    )()


def rates(optimizer, *steps):
    """Returns the learning rate at the given updates."""
    return [float(optimizer._learning_rate(step)) for step in steps]


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("adam", CLASSES.Adam),
        ("adamw", CLASSES.AdamW),
        ("sgd", CLASSES.SGD),
        ("rmsprop", CLASSES.RMSprop),
        ("adagrad", CLASSES.Adagrad),
        ("lion", CLASSES.Lion),
    ],
)
def test_each_name_makes_an_optimizer_that_descends(name, cls):
    optimizer = build(name=name, learning_rate=0.25)
    assert type(optimizer) is cls
    assert float(optimizer.learning_rate) == 0.25
    variable = tf.Variable([1.0, -1.0])
    optimizer.apply_gradients([(tf.constant([1.0, -1.0]), variable)])
    assert variable[0] < 1.0
    assert variable[1] > -1.0
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop", "adagrad", "lion"])
def test_weight_decay_of_every_optimizer_is_decoupled(name):
    changes = {}
    for decay in (0.0, 0.5):
        optimizer = build(name=name, learning_rate=0.25, weight_decay=decay)
        variable = tf.Variable([8.0])
        optimizer.apply_gradients([(tf.constant([0.0]), variable)])
        changes[decay] = float(variable[0]) - 8.0
    assert changes == {0.0: 0.0, 0.5: -0.25 * 0.5 * 8.0}


def test_momentum_of_sgd():
    optimizer = build(name="sgd", learning_rate=0.5, momentum=0.75)
    variable = tf.Variable([0.0])
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert float(variable[0]) == -(0.5 + 0.5 * (1 + 0.75))


def test_nesterov_of_sgd():
    optimizer = build(name="sgd", learning_rate=0.5, momentum=0.75, nesterov=True)
    variable = tf.Variable([0.0])
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert float(variable[0]) == -0.5 * (1 + 0.75)


def test_momentum_of_rmsprop():
    assert build(name="rmsprop", momentum=0.75).momentum == 0.75
    assert build(name="rmsprop").momentum == 0.0


@pytest.mark.parametrize(
    ("base", "batch", "rate"), [(0, 64, 0.5), (64, 64, 0.5), (64, 256, 2.0), (256, 64, 0.125)]
)
def test_learning_rate_is_scaled_linearly_with_the_batch(base, batch, rate):
    changes = dict(learning_rate=0.5, learning_rate_batch_size=base)
    assert optimizers.learning_rate(section(**changes), batch) == rate
    assert float(build(global_batch_size=batch, **changes).learning_rate) == rate
    cosine = build(global_batch_size=batch, schedule="cosine", **changes)
    assert rates(cosine, 0) == [rate]


def test_cosine_decays_over_all_steps():
    optimizer = build(steps=200, learning_rate=0.5, schedule="cosine")
    quarter = 0.5 * (1 + math.cos(math.pi / 4)) / 2
    expected = [0.5, quarter, 0.25, 0.0, 0.0]
    assert rates(optimizer, 0, 50, 100, 200, 300) == pytest.approx(expected, abs=1e-7)


def test_cosine_decays_over_decay_steps():
    optimizer = build(steps=200, learning_rate=0.5, schedule="cosine", decay_steps=100)
    assert rates(optimizer, 0, 50, 100, 200) == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=1e-7)


def test_cosine_decays_over_the_steps_after_the_warm_up():
    optimizer = build(steps=220, learning_rate=0.5, schedule="cosine", warmup_steps=20)
    expected = [0.0, 0.125, 0.25, 0.5, 0.25, 0.0, 0.0]
    assert rates(optimizer, 0, 5, 10, 20, 120, 220, 300) == pytest.approx(expected, abs=1e-7)


def test_cosine_decays_over_decay_steps_after_the_warm_up():
    optimizer = build(
        steps=1000, learning_rate=0.5, schedule="cosine", warmup_steps=20, decay_steps=200
    )
    assert rates(optimizer, 20, 120, 220) == pytest.approx([0.5, 0.25, 0.0], abs=1e-7)


def test_schedule_advances_with_each_update():
    optimizer = build(steps=2, name="sgd", learning_rate=1.0, schedule="cosine")
    variable, seen = tf.Variable([0.0]), []
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        seen.append(float(variable[0]))
    assert seen == pytest.approx([-1.0, -1.5, -1.5], abs=1e-6)


def test_each_call_makes_a_new_optimizer():
    make = optimizers.factory(section(), global_batch_size=4, steps=5)
    assert make() is not make()
