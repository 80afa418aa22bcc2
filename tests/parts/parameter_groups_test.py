"""Learning rates, freezing and weight decay by pattern, on one and on several replicas."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.parts import parameter_groups
from ctl.testing import tiny
from tests.support import reference_model
from tests.support.second_model import SecondModel


class Nested(tiny.TinyTrainer):
    """A backbone inside of the model: a dense layer and batch normalization."""

    def build_model(self):
        layers = tf_keras.layers
        stem = layers.Dense(5, name="stem", input_shape=(4,))
        backbone = tf_keras.Sequential([stem, layers.BatchNormalization(name="norm")], "backbone")
        return tf_keras.Sequential([backbone, layers.Dense(3, name="head")])


def make(replicas=1, cls=Nested, **options):
    return reference_model.make_trainer(testing.make_strategy(replicas), 8, cls=cls, **options)


class Two(SecondModel, Nested):
    """The optimizers are in a list of a dict."""

    def make_judge_optimizer(self):
        return decaying()

    def keep(self, judge, optimizer):
        self.judge, self.held = judge, {"judge": [optimizer]}


def decaying():
    return tf_keras.optimizers.SGD(0.5, weight_decay=0.25)


def moves(trainer, variables, steps=1):
    """By how much training moves each variable, by name."""
    before = [v.numpy() for v in variables]
    trainer.train(tf.constant(steps))
    return {v.name: v.numpy() - b for v, b in zip(variables, before, strict=True)}


def test_scales_and_exclusions_apply_to_the_variables_of_every_model():
    # Statistics per replica would differ.
    options = dict(cls=Two, optimizer=decaying, model={"sync_batch_norm": True})
    groups = [
        dict(variables="backbone/*/kernel", learning_rate_scale=0.25),
        dict(variables=["backbone/*", "head/bias"], learning_rate_scale=2),
        dict(variables="judge/end/*", learning_rate_scale=0.25),
    ]
    exclude = ["*/bias", "norm/*"]
    plain = make(weight_decay_exclude=["*"], **options)
    scaled = make(2, optimizer_groups=groups, weight_decay_exclude=exclude, **options)
    draw, variables = np.random.default_rng(0), {}
    for trainer in (plain, scaled):
        variables[trainer] = [*trainer.model.trainable_variables, *trainer.judge.variables]
    for one, other in zip(variables[plain], variables[scaled], strict=True):
        value = draw.normal(size=one.shape)
        one.assign(value)
        other.assign(value)
    weights = {v.name: v.numpy() for v in variables[plain]}
    reference, moved = (moves(trainer, variables[trainer]) for trainer in (plain, scaled))
    factors = {  # of the rate, and of the weight decay
        "stem/kernel:0": (0.25, 0.25), "stem/bias:0": (2, 0), "norm/gamma:0": (2, 0),
        "norm/beta:0": (2, 0), "head/kernel:0": (1, 0.25), "head/bias:0": (2, 0),
        "hidden/kernel:0": (1, 0.25), "hidden/bias:0": (1, 0),
        "end/kernel:0": (0.25, 0.25), "end/bias:0": (0.25, 0),
    }  # fmt: skip
    assert factors.keys() == moved.keys()
    for name, (scale, decay) in factors.items():
        expected = scale * (reference[name] - 0.5 * decay * weights[name])
        np.testing.assert_allclose(moved[name], expected, rtol=0, atol=1e-12, err_msg=name)
        assert np.abs(reference[name]).max() > 1e-6 or name == "stem/bias:0"


def apply(optimizer, groups=()):
    """By how much each of two updates moves each variable; without a trainer."""
    tf_keras.utils.set_random_seed(0)
    layers = [tf_keras.layers.Dense(3, name=name, dtype="float64") for name in ("stem", "head")]
    model = tf_keras.Sequential([tf_keras.Input([3]), *layers])
    options = ctl.TrainerOptions(optimizer_groups=groups)
    parameter_groups.configure(optimizer, {"": model}, options)
    results, draw = [], np.random.default_rng(0)
    for _ in range(2):
        before = model.get_weights()
        gradients = [tf.constant(draw.normal(size=v.shape)) for v in model.trainable_variables]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        pairs = zip(model.variables, before, strict=True)
        results.append({v.name: v.numpy() - b for v, b in pairs})
    return results


HALF = [dict(variables="head/*", learning_rate_scale=0.5)]


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_scaled_group_is_the_optimizer_with_the_scaled_rate_and_its_decay(name):
    cls = getattr(tf_keras.optimizers, name)
    fast, slow, mixed = (cls(rate, weight_decay=0.5) for rate in (0.02, 0.01, 0.02))
    for actual, one, half in zip(apply(mixed, HALF), apply(fast), apply(slow), strict=True):
        for variable, move in actual.items():
            expected = (half if variable.startswith("head") else one)[variable]
            np.testing.assert_allclose(move, expected, rtol=1e-6, atol=1e-12)
    assert float(mixed.learning_rate) == pytest.approx(0.02)
    assert isinstance(mixed, cls)


def test_scale_multiplies_every_rate_of_a_schedule():
    sgd = tf_keras.optimizers.SGD
    schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.125])
    for step, (move, rate) in enumerate(zip(apply(sgd(schedule), HALF), (0.5, 0.125), strict=True)):
        for name, scale in {"head/bias:0": 0.5, "stem/bias:0": 1.0}.items():
            expected = apply(sgd(rate * scale))[step][name]
            np.testing.assert_allclose(move[name], expected, rtol=1e-6)


def test_frozen_layers_do_not_change_and_have_no_slots():
    groups = [dict(variables="backbone/*", frozen=True)]
    momentum = lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    trainer = make(2, optimizer=momentum, optimizer_groups=groups)
    moved = moves(trainer, trainer.model.variables, steps=2)
    changed = {name for name, move in moved.items() if np.any(move)}
    assert changed == {"head/kernel:0", "head/bias:0"}  # nor the moving statistics
    slots = [v.name for v in trainer.optimizer.variables if "/" in v.name]
    assert len(slots) == 2 and all("head" in name for name in slots)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(optimizer_groups=[dict(variables="body/*", frozen=True)]),
            "optimizer.groups has 'body/*', a glob such as 'head/*', which no variable",
        ),
        (dict(weight_decay_exclude=["*/scale"]), "optimizer.weight_decay_exclude has '*/scale', a"),
        (
            dict(optimizer_groups=[dict(variables="backbone/stem/kernel", frozen=True)]),
            "freezes stem/kernel:0, but other variables of the",
        ),
    ],
)
def test_a_pattern_without_a_match_or_of_a_part_of_a_layer_is_one_line(options, message):
    with pytest.raises(ctl.UsageError) as error:
        make(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cls", "pattern", "message"),
    [
        (Two, "jugde/*", "weight_decay_exclude has 'jugde/*', a glob such as 'head/*', which no"),
        (
            type("Unbuilt", (Two,), {"is_built": False}),
            "*/bias",
            "applies to all models, but self.judge is not built: build it in the constructor",
        ),
    ],
)
def test_pattern_without_effect_in_a_second_model_is_one_line(cls, pattern, message):
    trainer = make(cls=cls, weight_decay_exclude=[pattern])  # its constructor may create models
    with pytest.raises(ctl.UsageError) as error:
        trainer.train(tf.constant(1))
    assert message in str(error.value)
