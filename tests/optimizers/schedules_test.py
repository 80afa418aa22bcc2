"""Every schedule, compared with numbers computed by hand, with and without a warm-up."""

import math

import pytest
import tensorflow as tf

import ctl
from ctl.optimizers import making
from ctl.optimizers.warm_up import WarmUp


def of(schedule, **arguments):
    """The keys of a schedule; the arguments that are no keys are those of the schedule."""
    keys = {k: arguments.pop(k) for k in ("decay_steps", "warmup_steps") if k in arguments}
    return {"schedule": schedule, **keys, "schedule_arguments": arguments}


def of_group(**optimizer):
    return dict(groups=[dict(variables="a", optimizer=optimizer)])


def rates(*steps, total=1000, **changes):
    """Returns the learning rate at the given updates; the peak is 0.5."""
    section = ctl.config(optimizer={"learning_rate": 0.5, **changes}).optimizer
    optimizer = making.make(section, global_batch_size=8, steps=total)
    rate = optimizer._learning_rate
    return [float(rate(tf.constant(step, tf.int64)) if callable(rate) else rate) for step in steps]


HALVED = dict(decay_steps=10, decay_factor=0.5)
PARTS = dict(boundaries=[3, 6], factors=[0.1, 0.01])
EQUAL = dict(decay_steps=10, period_factor=1.0, peak_factor=0.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (of("constant"), {0: 0.5, 900: 0.5}),
        (of("linear", end_factor=0.2), {0: 0.5, 500: 0.3, 1000: 0.1, 2000: 0.1}),
        (of("linear", decay_steps=100), {50: 0.25, 100: 0.0, 900: 0.0}),
        (of("polynomial"), {0: 0.5, 500: 0.125, 1000: 0.0}),
        (of("polynomial", power=3.0, end_factor=0.5), {500: 0.25 + 0.25 / 8, 1000: 0.25}),
        (of("cosine", end_factor=0.1), {0: 0.5, 500: 0.275, 1000: 0.05}),
        (of("exponential", **HALVED), {0: 0.5, 5: 0.5 * math.sqrt(0.5), 10: 0.25, 30: 0.0625}),
        (of("exponential", staircase=True, **HALVED), {9: 0.5, 10: 0.25, 19: 0.25, 20: 0.125}),
        (of("piecewise", **PARTS), {0: 0.5, 2: 0.5, 3: 0.05, 5: 0.05, 6: 0.005, 99: 0.005}),
        (of("inverse_sqrt", decay_steps=4), {0: 0.5, 12: 0.25, 32: 0.5 / 3}),
        (of("cosine_restarts", decay_steps=10), {0: 0.5, 5: 0.25, 10: 0.5, 20: 0.25, 30: 0.5}),
        (of("cosine_restarts", **EQUAL), {0: 0.5, 5: 0.25, 10: 0.25, 15: 0.125, 20: 0.125}),
    ],
)
def test_rate_of_every_schedule(changes, expected):
    assert rates(*expected, **changes) == pytest.approx([*expected.values()], abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (of("constant"), {100: 0.5, 900: 0.5}),
        (of("linear"), {550: 0.25, 1000: 0.0}),
        (of("exponential", decay_steps=10, decay_factor=0.1), {100: 0.5, 110: 0.05}),
        # The boundaries count from the first update, so they include the warm-up.
        (of("piecewise", boundaries=[300], factors=[0.1]), {299: 0.5, 300: 0.05}),
        # Vaswani et al. 2017: proportional to 1 / sqrt(update).
        (of("inverse_sqrt"), {100: 0.5, 400: 0.25, 900: 0.5 / 3}),
        (of("cosine_restarts", decay_steps=100), {100: 0.5, 150: 0.25, 200: 0.5}),
    ],
)
def test_warm_up_comes_before_any_schedule(changes, expected):
    values = {0: 0.0, 25: 0.125, 50: 0.25, 99: 0.495, 100: 0.5, **expected}
    found = rates(*values, warmup_steps=100, **changes)
    assert found == pytest.approx([*values.values()], abs=1e-7)


def test_rate_after_a_warm_up_may_be_another_constant():
    schedule = WarmUp(0.5, 100, 0.125)
    assert [float(schedule(step)) for step in (50, 99, 100)] == pytest.approx([0.25, 0.495, 0.125])


def test_warm_up_before_cosine_has_the_bits_of_tf_keras():
    from tf_keras.optimizers import schedules

    expected = schedules.CosineDecay(0.0, 200, warmup_target=0.1, warmup_steps=50)
    steps = range(0, 260, 7)
    found = rates(*steps, total=250, learning_rate=0.1, schedule="cosine", warmup_steps=50)
    assert found == [float(expected(tf.constant(step, tf.int64))) for step in steps]


def test_a_schedule_can_be_a_function_of_another_package():
    config = of("tf_keras.optimizers.schedules:InverseTimeDecay", decay_rate=1.0, decay_steps=10)
    assert rates(0, 10, 30, **config) == pytest.approx([0.5, 0.25, 0.125])
    config["schedule_arguments"]["decay_rat"] = 2.0
    with pytest.raises(ctl.UsageError, match=r"decay_rat is not an argument .* mean decay_rate\?"):
        rates(0, **config)
    config = of("tests.optimizers.custom:halving", decay_steps=10, warmup_steps=5)
    assert rates(0, 5, 15, 25, **config) == pytest.approx([0.0, 0.5, 0.25, 0.125])
    with pytest.raises(ctl.UsageError, match=r"returned a float"):
        rates(0, schedule="tests.optimizers.custom:number")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (of("cosin"), "did you mean cosine?"),
        (of("step"), "expected one of constant, cosine, linear"),
        (dict(decay_steps=5), "decay_steps is 5, but has no effect with optimizer.schedule=cons"),
        (of("exponential"), "requires optimizer.schedule_arguments.decay_factor"),
        (of("plateau", metric="eval/loss"), "schedule_arguments.mode, such as min"),
        (of("plateau", mode="min"), "schedule_arguments.metric, such as eval/loss"),
        (of("plateau", mode="low", metric="eval/x"), "mode is 'low', but must be such as 'min'"),
        (of("plateau", mode="min", metric="eval/x", factor=2.0), "factor is 2.0, but must be less"),
        (of("plateau", mode="min", metric="eval/x", patience=1.5), "must be an integer"),
        (of_group(schedule="plateau"), "only optimizer.schedule may be"),
        (of("exponential", decay_factor=0.5), "exponential requires optimizer.decay_steps"),
        (of("inverse_sqrt"), "requires optimizer.warmup_steps or optimizer.decay_steps"),
        (
            of("cosine", end_facto=0.5),
            "end_facto is not an argument of optimizer.schedule=cosine: d",
        ),
        (
            of("constant", power=2.0),
            "power is not an argument of optimizer.schedule=constant: optim",
        ),
        (of("cosine", end_factor="x"), "end_factor is 'x', but must be a finite number at least 0"),
        (of("piecewise", boundaries=[1, 2], factors=[0.1]), "each boundary requires the factor af"),
        (of("piecewise", boundaries=3, factors=[0.1]), "boundaries is 3, but must be a list"),
        (
            of("piecewise", boundaries=[1.5], factors=[0.1]),
            "contains 1.5, but must contain numbers",
        ),
        (of("piecewise", boundaries=[30, 20], factors=[0.1, 0.01]), "boundaries must increase"),
        (of("linear", warmup_steps=1000), "must be less than train.steps, which is 1000"),
    ],
)
def test_mistakes_are_one_line(changes, message):
    from ctl.configs import validation

    config = ctl.config(trainer="a.py:A", data=dict(global_batch_size=8), optimizer=changes)
    with pytest.raises(ctl.UsageError) as error:
        validation.check_config(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
