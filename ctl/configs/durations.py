"""Durations with units: "90 epochs", "5000000 examples", "30 minutes".

A number without a unit is a number of steps. Durations are resolved to steps once the global batch
size and the length of the training data are known, so that a batch that grows with the hardware does
not change the length of training.
"""

from collections.abc import Callable, Iterable, Mapping
import fractions
import functools
import math
import operator
import re
from typing import Any

from ml_collections import config_dict

from ctl.errors import UsageError, closest

LIMIT = "train.max_duration"  # a time, never a number of steps
BOUNDARIES = "optimizer.schedule_arguments.boundaries"  # a list of durations
GROUPS = "optimizer.groups"  # a list of mappings; frozen_until is a duration
_IN_GROUP = re.compile(r"^optimizer\.groups\[\d+\]\.optimizer\.")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
_UNITS = ("step", "epoch", "example", *_SECONDS)
_PATTERN = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?) *([A-Za-z]+)")
_SCIENTIFIC = re.compile(r"\d+(?:\.\d+)?[eE]\+?\d{1,2}")
_MOST = 2**31 - 1  # TensorFlow holds numbers of steps as int32
# Key of a duration -> whether it accepts a time, on which updates would depend; set by ctl.configs.keys.
ACCEPTS_TIME: dict[str, bool] = {}


def check(key: str, text: str) -> None:
    """Raises UsageError if a text is not a duration that the key accepts."""
    _parse(key, text)


def is_time(value: Any) -> bool:
    """Returns whether the value of a duration is a time, such as "30 minutes"."""
    return isinstance(value, str) and _parse("", value)[1] in _SECONDS


def split_interval(value: int | str) -> tuple[int, float]:
    """Returns the steps and the seconds of a resolved interval; the other one is 0."""
    if isinstance(value, int):
        return value, 0.0
    amount, unit = _parse("", value)
    return 0, float(amount * _SECONDS[unit])


def seconds(text: str) -> float:
    """Returns the seconds of `train.max_duration`.

    Raises:
        UsageError: the text is not a time.
    """
    amount, unit = _split(text)
    if unit not in _SECONDS or not amount:
        raise UsageError(
            f'{LIMIT} is {text!r}, but must be a time, such as "8 hours", "90 minutes" or "30 seconds".'
        )
    return float(amount * _SECONDS[unit])


def has_unit(key: str, value: Any) -> bool:
    """Returns whether a value is a duration, or a list with one, that is not resolved yet."""
    found: list[str] = []
    _convert(key, value, lambda name, text: found.append(text))
    return bool(found)


def _convert(key: str, value: Any, function: Callable[[str, str], Any]) -> Any:
    """Returns the value of a key with function(name, text) in place of each duration but times."""
    # A group may have an optimizer with the keys of the section `optimizer`.
    own = _IN_GROUP.sub("optimizer.", key)
    if isinstance(value, str):
        is_duration = own in ACCEPTS_TIME or own == BOUNDARIES or key.endswith(".frozen_until")
        return function(key, value) if is_duration and not is_time(value) else value
    if isinstance(value, Mapping):
        return {name: _convert(f"{key}.{name}", v, function) for name, v in value.items()}
    if isinstance(value, list | tuple) and own in (BOUNDARIES, GROUPS):
        names = (f"{key}[{i}]" if key == GROUPS else key for i in range(len(value)))
        return [_convert(name, v, function) for name, v in zip(names, value, strict=True)]
    return value


def from_text(key: str, text: str) -> int | str:
    """Parses the value of a key on the command line: an integer, or a duration with a unit."""
    try:
        return parse_integer(text)
    except ValueError:
        check(key, text)
        return text


def parse_integer(text: str) -> int:
    """Parses an integer, which may be written as 1e4.

    Raises:
        ValueError: the text is not an integer, such as 1.5e0.
    """
    if not _SCIENTIFIC.fullmatch(text.strip()):
        return int(text)
    value = fractions.Fraction(text)
    if value.denominator != 1:
        raise ValueError(f"{text} is not an integer")
    return int(value)


def resolve(
    config: config_dict.ConfigDict, *, examples_per_epoch: int | None
) -> config_dict.ConfigDict:
    """Returns a locked copy of a config with all durations but times as numbers of steps.

    A fraction of a step is rounded up: the last examples of an epoch count too.

    Args:
        config: a checked config with the global batch size resolved.
        examples_per_epoch: the number of training examples; None if it is not known.

    Raises:
        UsageError: a duration is in epochs, and the length of the data is not known; or it is longer
            than the largest number of steps.
    """
    result = config_dict.ConfigDict(config.to_dict())
    batch = config.data.global_batch_size
    convert = lambda key, text: to_steps(key, text, batch, examples_per_epoch)  # noqa: E731
    for key in (*ACCEPTS_TIME, BOUNDARIES, GROUPS):
        *path, name = key.split(".")
        section = functools.reduce(operator.getitem, path, result)
        if name in section:
            with result.ignore_type():
                section[name] = _convert(key, section[name], convert)
    _align_kept_checkpoints(config.train, result.train)
    return result.lock()


def resolve_groups(
    groups: Iterable[Mapping[str, Any]], *, batch: int, examples_per_epoch: int | None
) -> list[dict[str, Any]]:
    """Returns the groups of `optimizer.groups` with every `frozen_until` as a number of steps.

    Args:
        groups: checked groups.
        batch: the global batch size.
        examples_per_epoch: the number of training examples; None if it is not known.

    Raises:
        UsageError: a `frozen_until` is in epochs, and the length of the data is not known.
    """
    return _convert(
        GROUPS, list(groups), lambda key, text: to_steps(key, text, batch, examples_per_epoch)
    )


def check_boundaries(values: Mapping[str, Any]) -> None:
    """Raises UsageError for a list with a bad duration.

    Args:
        values: full names of keys -> values, of a complete config.
    """
    for element in values.get(BOUNDARIES, ()):
        if isinstance(element, str):
            check(BOUNDARIES, element)
        elif isinstance(element, bool) or not isinstance(element, int) or not 0 < element <= _MOST:
            raise UsageError(
                f"{BOUNDARIES} contains {element!r}, but must contain numbers of steps or texts such "
                'as "30 epochs".'
            )


def to_steps(key: str, text: str, batch: int, examples_per_epoch: int | None) -> int:
    """Returns the steps of a duration, rounded up.

    Args:
        key: the name of the value, for messages.
        text: such as "2 epochs".
        batch: the global batch size.
        examples_per_epoch: the number of training examples; None if it is not known.

    Raises:
        UsageError: the text is not a duration, or cannot be converted.
    """
    amount, unit = _parse(key, text)
    if unit == "epoch":
        if examples_per_epoch is None:
            raise UsageError(
                f"{key} is {text!r}, but the number of training examples is not known: return a "
                "ctl.data source from build_dataset, or give a number of steps or examples."
            )
        amount *= examples_per_epoch
    steps = math.ceil(amount if unit == "step" else amount / batch)
    if steps > _MOST:
        raise UsageError(f"{key} is {text!r}, which is {steps} steps, but must be at most {_MOST}.")
    return steps


def _align_kept_checkpoints(original: Any, resolved: Any) -> None:
    """Makes `checkpoint_keep_every` a multiple of `checkpoint_interval` if it had a unit.

    Both were rounded up separately: with 15.6 steps per epoch, 2 epochs are 32 steps and 4 epochs are
    63, so that no checkpoint would be at a multiple of 63.
    """
    interval, keep = resolved.checkpoint_interval, resolved.checkpoint_keep_every
    if isinstance(original.checkpoint_keep_every, str) and isinstance(interval, int) and interval:
        multiple = min(max(1, round(keep / interval)), _MOST // interval)
        resolved.checkpoint_keep_every = multiple * interval


def _split(text: str) -> tuple[fractions.Fraction, str]:
    """Returns a number and the word after it, without an s at its end; "" for another text."""
    match = _PATTERN.fullmatch(text.strip())
    if not match:
        return fractions.Fraction(), ""
    return fractions.Fraction(match[1].replace("_", "")), match[2].lower().removesuffix("s")


def _parse(key: str, text: str) -> tuple[fractions.Fraction, str]:
    """Returns the amount of a duration and its unit in the singular."""
    allows_time = ACCEPTS_TIME.get(key, not key)
    amount, unit = _split(text)
    units = [name for name in _UNITS if allows_time or name not in _SECONDS]
    if unit in units:
        if amount > 0:
            return amount, unit
        raise UsageError(f"{key} is {text!r}, but must be longer than 0 {unit}s.")
    if unit in _SECONDS:
        raise UsageError(
            f"{key} is {text!r}, but its length must not depend on the speed of the machine: use "
            "steps, epochs or examples."
        )
    similar = closest(f"{unit}s", [f"{name}s" for name in units])
    if similar:
        raise UsageError(f"{key} is {text!r}, which has no known unit: did you mean {similar}?")
    other = "30 minutes" if allows_time else "5000000 examples"
    examples = f'"90 epochs" or "{other}"'
    raise UsageError(f"{key} is {text!r}, but must be an integer or a duration such as {examples}.")
