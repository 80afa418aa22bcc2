"""Learning rates, freezing and weight decay by pattern, on one and on several replicas."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica.parts import parameter_groups
from ctl.testing import tiny


class Nested(tiny.TinyTrainer):
    """A backbone inside of the model: a dense layer and batch normalization."""

    def build_model(self):
        layers = tf_keras.layers
        backbone = tf_keras.Sequential(
            [
                layers.Dense(5, name="stem", input_shape=(4,)),
                layers.BatchNormalization(name="norm"),
            ],
            name="backbone",
        )
        return tf_keras.Sequential([backbone, layers.Dense(3, name="head")])


def make(replicas=1, cls=Nested, optimizer=None, **options):
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=8,
        optimizer=optimizer or (lambda: tf_keras.optimizers.SGD(0.5)),
        options=ctl.TrainerOptions(precision="float64", **options),
    )


def moves(trainer, steps=1):
    """By how much training moves each variable, by name."""
    before = [v.numpy() for v in trainer.model.variables]
    trainer.train(tf.constant(steps))
    variables = trainer.model.variables
    return {v.name: v.numpy() - b for v, b in zip(variables, before, strict=True)}


SYNCHRONIZED = dict(model={"sync_batch_norm": True})  # statistics per replica would differ


@functools.cache
def plain_moves():
    return moves(make(**SYNCHRONIZED))


def test_scale_multiplies_the_rate_of_the_variables_of_a_group():
    reference = plain_moves()
    groups = [
        dict(variables="backbone/*/kernel", learning_rate_scale=0.25),
        dict(variables=["backbone/*", "head/bias"], learning_rate_scale=2),
    ]
    scaled = moves(make(2, optimizer_groups=groups, **SYNCHRONIZED))
    factors = {"stem/kernel:0": 0.25, "stem/bias:0": 2, "norm/gamma:0": 2, "norm/beta:0": 2}
    factors |= {"head/bias:0": 2, "head/kernel:0": 1}
    for name, factor in factors.items():
        np.testing.assert_allclose(scaled[name], factor * reference[name], rtol=1e-12, atol=1e-15)
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
        results.append(
            {v.name: v.numpy() - b for v, b in zip(model.variables, before, strict=True)}
        )
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
    trainer = make(
        2, optimizer=lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9), optimizer_groups=groups
    )
    changed = {name for name, move in moves(trainer, steps=2).items() if np.any(move)}
    assert changed == {"head/kernel:0", "head/bias:0"}  # nor the moving statistics
    slots = [v.name for v in trainer.optimizer.variables if "/" in v.name]
    assert len(slots) == 2 and all("head" in name for name in slots)


def test_excluded_variables_have_no_weight_decay():
    trainer = make(
        optimizer=lambda: tf_keras.optimizers.SGD(0.5, weight_decay=0.25),
        weight_decay_exclude=["*/bias", "norm/*"],
        **SYNCHRONIZED,
    )
    weights = {v.name: v.numpy() for v in trainer.model.variables}
    moved, undecayed = moves(trainer), plain_moves()
    for name in ("stem/kernel:0", "head/kernel:0"):
        expected = undecayed[name] - 0.5 * 0.25 * weights[name]
        np.testing.assert_allclose(moved[name], expected, atol=1e-12)
    for name in ("stem/bias:0", "head/bias:0", "norm/gamma:0", "norm/beta:0"):
        np.testing.assert_array_equal(moved[name], undecayed[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(optimizer_groups=[dict(variables="body/*", frozen=True)]),
            "optimizer.groups has 'body/*', which no variable of the model matches: its variables are",
        ),
        (
            dict(weight_decay_exclude=["*/scale"]),
            "optimizer.weight_decay_exclude has '*/scale', which no variable of the model matches",
        ),
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


class Two(Nested):
    """A second model with the names of the first one's head, and an optimizer of its own."""

    hold = staticmethod(lambda optimizer: optimizer)  # an attribute; or in a dict
    build_second = True

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            layers = tf_keras.layers
            self.judge = tf_keras.Sequential(
                [layers.Dense(3, name="hidden"), layers.Dense(1, name="end")]
            )
            if self.build_second:
                self.judge.build([None, 4])
            second = tf_keras.optimizers.SGD(0.5, weight_decay=0.25)
            if self.build_second:
                second.build(self.judge.trainable_variables)
            self.second = self.hold(second)

    def replica_step(self, batch):
        second = tf.nest.flatten([self.second])[0]
        self.minimize(
            batch,
            lambda rows: tf.square(self.judge(rows["x"])[:, 0] - 1),
            variables=self.judge.trainable_variables,
            optimizer=second,
        )
        return super().replica_step(batch)


def judge_moves(**options):
    """By how much a step moves the second model, and its weights before."""
    trainer = make(**{"cls": Two, **options})
    draw = np.random.default_rng(0)
    for variable in trainer.judge.variables:
        variable.assign(draw.normal(size=variable.shape))
    before = {v.name: v.numpy() for v in trainer.judge.variables}
    trainer.train(tf.constant(1))
    return {v.name: v.numpy() - before[v.name] for v in trainer.judge.variables}, before


@functools.cache
def plain_judge():
    return judge_moves(weight_decay_exclude=["judge/*"])[0]


@pytest.mark.parametrize(
    ("replicas", "hold"),
    [
        (1, lambda optimizer: {"judge": [optimizer]}),
        # The first model's statistics per replica differ, but it does not influence the second one.
        pytest.param(2, Two.hold, marks=pytest.mark.slow),
    ],
    ids=["in a list of a dict", "as an attribute"],
)
def test_groups_and_exclusions_apply_to_the_optimizer_of_a_second_model(replicas, hold):
    moved, before = judge_moves(
        cls=type("Held", (Two,), {"hold": staticmethod(hold)}),
        replicas=replicas,
        weight_decay_exclude=["*/bias"],
        optimizer_groups=[dict(variables="judge/end/*", learning_rate_scale=0.25)],
    )
    factors = {  # of the rate, and of the weight decay
        "hidden/kernel:0": (1, 0.25), "hidden/bias:0": (1, 0),
        "end/kernel:0": (0.25, 0.25), "end/bias:0": (0.25, 0),
    }  # fmt: skip
    for name, (scale, decay) in factors.items():
        expected = scale * (plain_judge()[name] - 0.5 * decay * before[name])
        np.testing.assert_allclose(moved[name], expected, rtol=0, atol=1e-12, err_msg=name)
        assert np.abs(plain_judge()[name]).max() > 1e-3


@pytest.mark.parametrize(
    ("cls", "pattern", "message"),
    [
        (Two, "jugde/*", "weight_decay_exclude has 'jugde/*', which no variable of the model"),
        (
            type("Unbuilt", (Two,), {"build_second": False}),
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
