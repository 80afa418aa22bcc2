"""The optimizer and schedule that a config defines, compared with numbers computed by hand."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.optimizers import FromConfig, making

CUSTOM = "tests.optimizers.custom"


def section(**changes):
    """Returns the section `optimizer` of a config."""
    return ctl.config(optimizer=changes).optimizer


def build(steps=1000, global_batch_size=64, **changes):
    """Makes the optimizer that a section defines."""
    return making.make(section(**changes), global_batch_size=global_batch_size, steps=steps)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Lion"])
def test_each_name_makes_an_optimizer_whose_weight_decay_is_decoupled(name):
    for decay in (0.0, 0.5):
        optimizer = build(name=name.lower(), learning_rate=0.25, weight_decay=decay)
        assert type(optimizer) is getattr(tf_keras.optimizers, name)
        variable = tf.Variable([8.0])
        optimizer.apply_gradients([(tf.constant([0.0]), variable)])
        assert float(variable[0]) - 8.0 == -0.25 * decay * 8.0


@pytest.mark.parametrize(
    ("base", "batch", "rate"), [(0, 64, 0.5), (64, 256, 2.0), (256, 64, 0.125)]
)
def test_learning_rate_is_scaled_linearly_with_the_batch(base, batch, rate):
    changes = dict(learning_rate=0.5, learning_rate_batch_size=base)
    assert making.learning_rate(section(**changes), batch) == rate
    assert float(build(global_batch_size=batch, **changes).learning_rate) == rate
    cosine = build(global_batch_size=batch, schedule="cosine", **changes)
    assert float(cosine._learning_rate(0)) == rate


def test_schedule_advances_with_each_update():
    optimizer = build(steps=2, name="sgd", learning_rate=1.0, schedule="cosine")
    variable, seen = tf.Variable([0.0]), []
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        seen.append(float(variable[0]))
    assert seen == pytest.approx([-1.0, -1.5, -1.5], abs=1e-6)


def test_arguments_of_the_class_come_from_the_config():
    optimizer = build(name="adam", arguments=dict(beta_2=0.75, epsilon=1e-3, amsgrad=True))
    assert (optimizer.beta_1, optimizer.beta_2) == (0.9, 0.75)
    assert (optimizer.epsilon, optimizer.amsgrad) == (1e-3, True)
    for name in ("rmsprop", "sgd"):
        assert [build(name=name, momentum=m).momentum for m in (0.75, 0.0)] == [0.75, 0.0]


def test_optimizer_can_be_a_function_of_another_package():
    optimizer = build(name=f"{CUSTOM}:heavy_ball", learning_rate=0.5, arguments=dict(friction=0.25))
    assert (float(optimizer.learning_rate), optimizer.momentum) == (0.5, 0.75)
    assert type(build(name="tf_keras.optimizers:Ftrl")) is tf_keras.optimizers.Ftrl


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(arguments=dict(beta_3=0.5)), "beta_3 is not an argument of Adam: did you mean beta_"),
        (dict(arguments=dict(lr=0.5)), "lr is not an argument of Adam: expected one of beta_1"),
        (dict(arguments=dict(beta_1="x")), "beta_1 is 'x', but must be a finite number."),
        (dict(arguments=dict(beta_1=1.0)), "is 1.0, but must be at least 0 and less than 1."),
        (dict(arguments=dict(epsilon=-1.0)), "epsilon is -1.0, but must be at least 0."),
        (dict(arguments=dict(amsgrad=1)), "amsgrad is 1, but must be true or false."),
        (dict(arguments=dict(learning_rate=1.0)), "no effect: set optimizer.learning_rate, and"),
        (dict(arguments=dict(weight_decay=1.0)), "no effect: set optimizer.weight_decay, and"),
        (dict(arguments=dict(clipnorm=1.0)), "has no effect: set optimizer.clip.norm, which"),
        (dict(name="nowhere.at_all:f"), "nowhere.at_all cannot be imported (ModuleNotFoundError"),
        (dict(name="tf_keras.optimizers:Adan"), "has no Adan: did you mean Adam?"),
        (dict(name=f"{CUSTOM}:nothing"), "returned None: return a tf_keras"),
        (dict(name=f"{CUSTOM}:fails"), "fails raised ValueError: of a bad mood"),
        (dict(name=f"{CUSTOM}:heavy_ball", weight_decay=0.5), "heavy_ball raised TypeError"),
    ],
)
def test_mistakes_are_one_line(changes, message):
    with pytest.raises(ctl.UsageError) as error:
        build(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_optimizer_of_a_config_is_made_from_the_resolved_config():
    def resolve(examples):
        optimizer = dict(name="sgd", schedule="linear")
        return ctl.config(optimizer=optimizer, train=dict(steps=examples // 2))

    make = FromConfig(resolve)
    make.examples_per_epoch = 100
    assert not make.called
    assert float(make()._learning_rate(25)) == pytest.approx(5e-4)
    assert make.called
