"""The config of the optimizer and its schedule."""

from typing import Any

from ctl import errors, optimizers
from ctl.configs import durations
from ctl.configs.component import Key, Rule, Values, check_number
from ctl.errors import UsageError, did_you_mean
from ctl.optimizers import arguments, schedules

_EXAMPLES = {"decay_factor": "0.5", "boundaries": "[1000, 2000]", "factors": "[0.1, 0.01]"}
_EXAMPLES |= {"metric": "eval/loss", "mode": "min"}


def _check_name(key: str, name: str) -> None:
    """Raises UsageError if a name is neither in the table nor the name of a function."""
    if name not in optimizers.CLASSES and not arguments.is_function_name(name):
        hint = did_you_mean(name, [*optimizers.CLASSES, "package.module:function"])
        raise UsageError(f"{key} is {name!r}{hint}")


# fmt: off
KEYS = (
    Key("optimizer", {}),
    Key("optimizer.name", "adam", validate=_check_name, grouped=True,
        text=f"Selects the optimizer: {', '.join(optimizers.CLASSES)}"
             ", or a class or function of yours as package.module:function."),
    Key("optimizer.arguments", {}, grouped=True, free=True,
        text="Holds further arguments of the optimizer's class, such as beta_2 or epsilon."),
    Key("optimizer.learning_rate", 0.001, also=("lr",), grouped=True, least=0,
        bound=(lambda rate: rate > 0, "greater than 0"),
        text="Sets the highest learning rate, which the schedule multiplies by its factor."),
    Key("optimizer.learning_rate_batch_size", 0, grouped=True, least=0,
        text="If not 0, optimizer.learning_rate is for this global batch size and is scaled "
             'linearly with the actual one (Goyal et al. 2017, "Accurate, large minibatch SGD").'),
    Key("optimizer.schedule", "constant", also=("lr scheduler",), grouped=True,
        text=f"Selects how the learning rate changes: {', '.join(schedules.KINDS)}"
             ", or a function of yours as package.module:function."),
    Key("optimizer.schedule_arguments", {}, grouped=True, free=True,
        text="Holds arguments of the schedule, such as end_factor, which is the last rate as a "
             "fraction of optimizer.learning_rate."),
    Key("optimizer.warmup_steps", 0, also=("lr warmup",), grouped=True, least=0, duration=True,
        text="Sets the number of updates in which the learning rate rises linearly from 0 before "
             "the schedule."),
    Key("optimizer.decay_steps", 0, grouped=True, least=0, duration=True,
        text="Sets the number of updates of the decay after the warm-up. With 0, it ends at "
             "train.steps."),
    Key("optimizer.momentum", 0.0, grouped=True, least=0,
        bound=(lambda momentum: momentum < 1, "less than 1, such as 0.9"),
        text=f"Sets the momentum of {', '.join(optimizers.MOMENTUM)}."),
    Key("optimizer.weight_decay", 0.0, grouped=True, least=0,
        text="Sets the decoupled weight decay, as the argument weight_decay of tf_keras optimizers "
             "does."),
)
# fmt: on


def _check_schedule(values: Values) -> None:
    """Checks the schedule and its arguments; durations may still have units."""
    name, prefix = values["optimizer.schedule"], "optimizer.schedule_arguments."
    if name not in schedules.KINDS:
        if not arguments.is_function_name(name):
            hint = errors.did_you_mean(name, [*schedules.KINDS, "package.module:function"])
            raise UsageError(f"optimizer.schedule is {name!r}{hint}")
        return
    kind = schedules.KINDS[name]
    given = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    for key, value in given.items():
        if key not in kind.arguments:
            hint = errors.did_you_mean(key, list(kind.arguments))
            hint = hint or f": optimizer.schedule={name} has no arguments."
            raise UsageError(f"{prefix}{key} is not an argument of optimizer.schedule={name}{hint}")
        _check_argument(f"{prefix}{key}", key, value)
    for key, default in kind.arguments.items():
        if default is None and key not in given:
            raise UsageError(
                f"optimizer.schedule={name} requires {prefix}{key}, such as {_EXAMPLES[key]}: set it."
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


def _check_argument(full_name: str, key: str, value: Any) -> None:
    is_allowed, requirement = True, ""
    if key == "staircase":
        is_allowed, requirement = isinstance(value, bool), "true or false"
    elif key in ("metric", "mode"):
        is_allowed = isinstance(value, str) and (key == "metric" or value in ("min", "max"))
        requirement = f"such as {_EXAMPLES[key]!r}"
    elif key in ("boundaries", "factors"):
        is_allowed = isinstance(value, list | tuple) and len(value) > 0
        requirement = f"a list, such as {_EXAMPLES[key]}"
    else:
        check_number(full_name, value, zero=key in ("end_factor", "min_delta"))
        if key == "patience":
            is_allowed, requirement = isinstance(value, int), "an integer"
        if key == "factor":
            is_allowed, requirement = value < 1, "less than 1"
    if not is_allowed:
        raise UsageError(f"{full_name} is {value!r}, but must be {requirement}.")
    if key == "factors":  # boundaries are durations, which `configs.durations` checks
        for element in value:
            check_number(full_name, element, zero=True)


def _check_decay_steps(values: Values, kind: schedules.ScheduleKind) -> None:
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


def _is_known(v: Values) -> bool:
    """Returns whether the optimizer is one of ctl's; a function of the user may have any argument."""
    return v["optimizer.name"] in optimizers.CLASSES


def _decays(v: Values) -> bool:
    decays = v["optimizer.weight_decay"] or v["optimizer.name"] in optimizers.LAYERWISE
    return bool(decays or any(group.get("optimizer") for group in v["optimizer.groups"]))


def _warms_up_too_long(v: Values) -> bool:
    steps, warmup = v["train.steps"], v["optimizer.warmup_steps"]
    ends = schedules.ends_at_last_step(v["optimizer.schedule"], v["optimizer.decay_steps"])
    # Durations with units are compared once they are resolved.
    return ends and isinstance(steps, int) and isinstance(warmup, int) and warmup >= steps


# fmt: off
RULES = (
    Rule(lambda v: v["optimizer.momentum"] and _is_known(v)
                   and v["optimizer.name"] not in optimizers.MOMENTUM,
         "optimizer.momentum is {optimizer.momentum}, but has no effect with "
         "optimizer.name={optimizer.name}",
         "set it to 0, or choose optimizer.name=sgd"),
    Rule(lambda v: v["optimizer.shard_state"] and _is_known(v)
                   and v["optimizer.name"] not in optimizers.ELEMENTWISE,
         "optimizer.shard_state updates slices of variables, and optimizer.name={optimizer.name} "
         "requires complete ones",
         "set optimizer.shard_state=false, or choose optimizer.name="
         f"{', '.join(optimizers.ELEMENTWISE[:-1])} or {optimizers.ELEMENTWISE[-1]}"),
    Rule(lambda v: v["optimizer.weight_decay_exclude"] and _is_known(v) and not _decays(v),
         "optimizer.weight_decay_exclude has no effect without optimizer.weight_decay",
         "set it, or remove optimizer.weight_decay_exclude"),
    # Each update also subtracts this fraction of every weight; from 1 on, it reverses their signs.
    Rule(lambda v: v["optimizer.weight_decay"] * v["optimizer.learning_rate"] >= 1,
         "optimizer.weight_decay is {optimizer.weight_decay} and optimizer.learning_rate is "
         "{optimizer.learning_rate}",
         "their product, the fraction of each weight that an update subtracts, must be less than 1"),
    _check_schedule,
    durations.check_boundaries,
    Rule(_warms_up_too_long,
         "optimizer.warmup_steps is {optimizer.warmup_steps}, but must be less than train.steps, "
         "which is {train.steps}"),
)
# fmt: on
