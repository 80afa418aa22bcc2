"""Learning rate schedules: a table of kinds, each optionally after a linear warm-up.

Every factor is relative to the peak learning rate, so that a rate that is scaled with the batch size
scales the complete schedule.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

from ctl import errors
from ctl.errors import UsageError
from ctl.optimizers import arguments


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of schedule.

    Attributes:
        make: (rate, decay steps, warm-up steps, arguments) -> a schedule of the updates after the
            warm-up; a float for a constant rate.
        arguments: the keys of `optimizer.schedule_arguments` and their defaults; None if a value is
            required.
        decay: what `optimizer.decay_steps` means: "total" (0: up to `train.steps`), "required",
            "scale" (0: the warm-up), or "" (it has no effect).
    """

    make: Callable[[float, int, int, Mapping[str, Any]], Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decay: str = "total"


def _tf_keras(name: str, **keys: str) -> Callable[..., Any]:
    """Returns a function that makes a schedule of tf_keras.

    Args:
        name: the class.
        **keys: arguments of the class -> their keys in `optimizer.schedule_arguments`.
    """

    def make(rate: float, steps: int, warmup: int, values: Mapping[str, Any]) -> Any:
        import tf_keras

        arguments = {argument: values[key] for argument, key in keys.items()}
        return getattr(tf_keras.optimizers.schedules, name)(rate, steps, **arguments)

    return make


def _polynomial(rate: float, steps: int, warmup: int, values: Mapping[str, Any]) -> Any:
    import tf_keras

    return tf_keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=rate * values["end_factor"], power=values.get("power", 1.0)
    )


def _piecewise(rate: float, steps: int, warmup: int, values: Mapping[str, Any]) -> Any:
    import tf_keras

    # tf_keras keeps the old value up to and including the boundary, which would be one update more
    # than the boundary says. Boundaries count from the first update, the schedule from the warm-up.
    boundaries = [boundary - warmup - 1 for boundary in values["boundaries"]]
    rates = [rate, *(rate * factor for factor in values["factors"])]
    return tf_keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, rates)


def _inverse_sqrt(rate: float, steps: int, warmup: int, values: Mapping[str, Any]) -> Any:
    from ctl.optimizers.warm_up import InverseSqrt

    return InverseSqrt(rate, steps or warmup)


KINDS = {
    "constant": Kind(lambda rate, *_: rate, decay=""),
    "cosine": Kind(_tf_keras("CosineDecay", alpha="end_factor"), {"end_factor": 0.0}),
    "linear": Kind(_polynomial, {"end_factor": 0.0}),
    "polynomial": Kind(_polynomial, {"end_factor": 0.0, "power": 2.0}),
    "exponential": Kind(
        _tf_keras("ExponentialDecay", decay_rate="decay_factor", staircase="staircase"),
        {"decay_factor": None, "staircase": False},
        "required",
    ),
    "piecewise": Kind(_piecewise, {"boundaries": None, "factors": None}, decay=""),
    "inverse_sqrt": Kind(_inverse_sqrt, decay="scale"),
    "cosine_restarts": Kind(
        _tf_keras(
            "CosineDecayRestarts", t_mul="period_factor", m_mul="peak_factor", alpha="end_factor"
        ),
        {"end_factor": 0.0, "period_factor": 2.0, "peak_factor": 1.0},
        "required",
    ),
}


def make(config: Any, rate: float, steps: int) -> Any:
    """Makes the schedule that a config defines.

    Args:
        config: the section `optimizer` of a checked config, with durations as numbers of updates.
        rate: the peak learning rate.
        steps: the total number of updates.

    Returns:
        A tf_keras schedule, or a float for a constant rate without a warm-up.
    """
    warmup, given = config.warmup_steps, config.schedule_arguments.to_dict()
    kind = KINDS.get(config.schedule)
    if kind is None:
        after = _custom(config.schedule, rate, config.decay_steps or steps - warmup, given)
    else:
        decay_steps = config.decay_steps
        if kind.decay == "total":
            decay_steps = decay_steps or steps - warmup
        after = kind.make(rate, decay_steps, warmup, {**kind.arguments, **given})
    if not warmup:
        return after
    from ctl.optimizers.warm_up import WarmUp

    return WarmUp(rate, warmup, after)


def ends_at_last_step(schedule: str, decay_steps: int | str) -> bool:
    """Returns whether a schedule depends on `train.steps`.

    Args:
        schedule: `optimizer.schedule`.
        decay_steps: `optimizer.decay_steps`.
    """
    kind = KINDS.get(schedule)
    return (kind is None or kind.decay == "total") and not decay_steps


def check(values: Mapping[str, Any]) -> None:
    """Checks the schedule's name and arguments; durations may still have units.

    Args:
        values: full names of keys -> values, of a complete config.

    Raises:
        UsageError: the schedule does not exist, or a key is wrong, missing, or without an effect.
    """
    name, prefix = values["optimizer.schedule"], "optimizer.schedule_arguments."
    if name not in KINDS:
        if not arguments.is_function_name(name):
            hint = errors.did_you_mean(name, [*KINDS, "package.module:function"])
            raise UsageError(f"optimizer.schedule is {name!r}{hint}")
        return
    kind = KINDS[name]
    given = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    for key, value in given.items():
        if key not in kind.arguments:
            hint = errors.did_you_mean(key, list(kind.arguments))
            hint = hint or f": optimizer.schedule={name} has no arguments."
            raise UsageError(f"{prefix}{key} is not an argument of optimizer.schedule={name}{hint}")
        _check_argument(f"{prefix}{key}", key, value)
    missing = [
        key for key, default in kind.arguments.items() if default is None and key not in given
    ]
    if missing:
        raise UsageError(
            f"optimizer.schedule={name} requires {prefix}{missing[0]}, such as "
            f"{_EXAMPLES[missing[0]]}: set it."
        )
    if name == "piecewise" and len(given["boundaries"]) != len(given["factors"]):
        raise UsageError(
            f"{prefix}boundaries has {len(given['boundaries'])} and {prefix}factors has "
            f"{len(given['factors'])} elements, but each boundary requires the factor after it."
        )
    boundaries = given.get("boundaries", [])
    numbers = [b for b in boundaries if isinstance(b, int)]  # the others still have units
    if len(numbers) == len(boundaries) and numbers != sorted(set(numbers)):
        raise UsageError(f"{prefix}boundaries is {boundaries}, but boundaries must increase.")
    _check_decay_steps(values, kind)


_EXAMPLES = {"decay_factor": "0.5", "boundaries": "[1000, 2000]", "factors": "[0.1, 0.01]"}


def _check_argument(full_name: str, key: str, value: Any) -> None:
    if key == "staircase":
        if not isinstance(value, bool):
            raise UsageError(f"{full_name} is {value!r}, but must be true or false.")
        return
    if key not in ("boundaries", "factors"):
        _check_number(full_name, value, zero=key == "end_factor")
        return
    if not isinstance(value, list | tuple) or not value:
        raise UsageError(f"{full_name} is {value!r}, but must be a list, such as {_EXAMPLES[key]}.")
    if key == "factors":  # boundaries are durations, which `configs.durations` checks
        for element in value:
            _check_number(full_name, element, zero=True)


def _check_number(full_name: str, value: Any, *, zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or not (value or zero):
        bound = "at least 0" if zero else "greater than 0"
        raise UsageError(f"{full_name} is {value!r}, but must be a finite number {bound}.")


def _check_decay_steps(values: Mapping[str, Any], kind: Kind) -> None:
    name = values["optimizer.schedule"]
    decay, warmup = values["optimizer.decay_steps"], values["optimizer.warmup_steps"]
    if not kind.decay and decay:
        raise UsageError(
            f"optimizer.decay_steps is {decay}, but has no effect with optimizer.schedule={name}: set "
            "it to 0, or choose optimizer.schedule=cosine."
        )
    if kind.decay == "required" and not decay:
        raise UsageError(
            f"optimizer.schedule={name} requires optimizer.decay_steps: set it to the length of the "
            "first period."
        )
    if kind.decay == "scale" and not (decay or warmup):
        raise UsageError(
            f"optimizer.schedule={name} requires optimizer.warmup_steps or optimizer.decay_steps: set "
            "the number of updates after which the rate has fallen by 1/sqrt(2)."
        )


def _custom(name: str, rate: float, decay_steps: int, given: Mapping[str, Any]) -> Any:
    import tf_keras

    function = arguments.load("optimizer.schedule", name)
    reserved = {"learning_rate": "optimizer.learning_rate", "decay_steps": "optimizer.decay_steps"}
    arguments.check(function, given, reserved=reserved, key="optimizer.schedule_arguments")
    # By position, because tf_keras' schedules call the rate `initial_learning_rate`.
    schedule = arguments.call("schedule", functools.partial(function, rate, decay_steps), **given)
    if not isinstance(schedule, tf_keras.optimizers.schedules.LearningRateSchedule):
        raise UsageError(
            f"optimizer.schedule is {name!r}, which returned {errors.type_name(schedule)}: return a "
            "tf_keras.optimizers.schedules.LearningRateSchedule."
        )
    return schedule
