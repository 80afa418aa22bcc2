"""Learning rate schedules: a table of kinds, each optionally after a linear warm-up.

Every factor is relative to the peak learning rate, so that a rate that is scaled with the batch size
scales the complete schedule.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from ctl import errors
from ctl.errors import UsageError
from ctl.optimizers import arguments


@dataclasses.dataclass(frozen=True)
class ScheduleKind:
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


def _plateau(rate: float, *_: Any) -> Any:
    from ctl.optimizers.warm_up import Plateau

    return Plateau(rate)


KINDS = {
    "constant": ScheduleKind(lambda rate, *_: rate, decay=""),
    "cosine": ScheduleKind(_tf_keras("CosineDecay", alpha="end_factor"), {"end_factor": 0.0}),
    "linear": ScheduleKind(_polynomial, {"end_factor": 0.0}),
    "polynomial": ScheduleKind(_polynomial, {"end_factor": 0.0, "power": 2.0}),
    "exponential": ScheduleKind(
        _tf_keras("ExponentialDecay", decay_rate="decay_factor", staircase="staircase"),
        {"decay_factor": None, "staircase": False},
        "required",
    ),
    "piecewise": ScheduleKind(_piecewise, {"boundaries": None, "factors": None}, decay=""),
    "inverse_sqrt": ScheduleKind(_inverse_sqrt, decay="scale"),
    # The arguments are those of ctl/loop/actions/plateau.py, which lowers the rate.
    "plateau": ScheduleKind(
        _plateau,
        {"metric": None, "mode": None, "patience": 3, "factor": 0.1}
        | {"min_delta": 0.0, "end_factor": 0.0},
        decay="",
    ),
    "cosine_restarts": ScheduleKind(
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
