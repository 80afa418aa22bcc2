"""The values that a single key may have. The messages for the others: mistakes_test.py."""

import math

import pytest

from ctl.configs import component, keys, overrides
from ctl.errors import UsageError

DEFAULTS = overrides.flatten(keys.defaults())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("runtime.xla", name) for name in ("off", "step", "gradients", "autocluster")),
        ("runtime.devices", ["GPU:0", "GPU:2"]),
        ("init.variables", ["conv*/*"]),
        ("data.prefetch", -1),
        ("train.steps", 1),
        ("train.steps", 2**31 - 1),
        ("train.loss_spike", 1.5),
        ("eval.interval", 0),
        ("seed", 2**32 - 1),
        ("optimizer.learning_rate", 1e-300),
        ("optimizer.momentum", 0.999),
    ],
)
def test_value_is_allowed(key, value):
    keys.check_values(DEFAULTS | {key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("runtime.xla", True, r"runtime\.xla is True: expected one of auto, off, "),
        ("train.steps", 0, r"train\.steps is 0, but must be at least 1\."),
        ("train.steps", 2**31, r"train\.steps is 2147483648, but must be at most 2147483647\."),
        ("seed", 2**32, r"seed is 4294967296, but must be at most 4294967295\."),
        ("train.loss_spike", 1.0, r"is 1\.0, but must be greater than 1, such as"),
        ("train.loss_spike", math.nan, r"is nan, but must be a finite number, at least 0\."),
        ("runtime.loss_scale", -1.0, r"is -1\.0, but must be a finite number, at least 0\."),
        ("runtime.devices", [10**5000], r"runtime\.devices contains an int, but must contain"),
        ("runtime.devices", ["GPU:x"], r"runtime\.devices"),
        ("init.variables", [""], r"init\.variables contains '', but must contain patterns"),
    ],
)
def test_value_is_rejected_in_one_line(key, value, message):
    with pytest.raises(UsageError, match=f"^.*{message}") as rejection:
        keys.check_values({key: value})
    assert "\n" not in str(rejection.value)


def test_keys_of_the_experiment_may_have_any_value():
    keys.check_values({"model.units": object()})


@pytest.mark.parametrize("sign", [1, -1])
def test_integer_of_thousands_of_digits_is_described_by_their_number(sign):
    assert component.format_integer(sign * 10**5000) == "a number of 5001 digits"
    assert component.format_integer(sign * 12) == str(sign * 12)
    with pytest.raises(UsageError, match=r"train\.steps .*5001 digits"):
        keys.check_values({"train.steps": sign * 10**5000})
