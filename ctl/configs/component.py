"""What a component of ctl declares for the config of an experiment: its keys and its rules.

A component has a module `config.py` that does not import TensorFlow, with a tuple `KEYS` and a tuple
`RULES`; `keys.py` imports these modules. Mistakes are reported before TensorFlow is imported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import math
import re
from typing import Any

from ctl import errors
from ctl.errors import UsageError, closest, did_you_mean

MAX_DIGITS = 99  # in an integer; Python refuses to print integers of thousands of digits
_MOST = 2**31 - 1  # TensorFlow holds these numbers as int32
_TYPE_NAMES = {bool: "boolean", float: "number", int: "integer", list: "list", str: "string"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of an experiment's config, or a section of keys.

    Attributes:
        name: its full name, such as "train.steps".
        default: its default; {} for a section.
        text: what it means.
        choices: the allowed values, of which texts are allowed besides booleans; empty for any of the
            default's type.
        least: the smallest number that is allowed; None for no bound.
        most: the largest integer that is allowed if `least` is set.
        bound: another condition: whether a value is allowed, and what the message requires.
        validate: a function of (name, value) that raises UsageError for a value that is not allowed.
        duration: whether the key is a number of steps that may be a text such as "90 epochs".
        time: whether the text may also be a time, such as "30 minutes".
        option: the field of `TrainerOptions` that the key is; "" for none.
        elements: the type of the elements of a list, or of the values of a section, for editors.
        part: the part of the update that is added if the option is set, module:class in ctl.parts.
        depends_on_split: whether updates with the option depend on the split, so that comparisons of
            splits leave it out.
        harmless: whether a run that is resumed may change the key, or the keys of the section, without
            --allow_config_change. These are keys of the hardware, of the number of micro-batches, of
            what only observes, and of when a run stops or skips.
        evaluated: whether an evaluation depends on the key, although others of its section only change
            trainings.
        free: whether the experiment chooses the keys of the section: those of its own model, arguments
            of functions, and names of its models.
        grouped: whether the optimizer of a group of `optimizer.groups` may have the key.
        optional: whether ctl reads a key that only some experiments set, in a free section.
        also: what other libraries call it, for `ctl keys` and for messages about unknown keys.
        meant: what other libraries call a choice -> the choice.
    """

    name: str
    default: Any
    text: str = ""
    choices: Sequence[Any] = ()
    least: int | None = None
    most: int = _MOST
    bound: tuple[Callable[[Any], bool], str] | None = None
    validate: Callable[[str, Any], None] | None = None
    duration: bool = False
    time: bool = False
    option: str = ""
    elements: str = ""
    part: str = ""
    depends_on_split: bool = False
    harmless: bool = False
    evaluated: bool = False
    free: bool = False
    grouped: bool = False
    optional: bool = False
    also: tuple[str, ...] = ()
    meant: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_section(self) -> bool:
        """Whether this is a section with keys of ctl."""
        return self.default == {} and not self.free

    @property
    def is_mixed(self) -> bool:
        """Whether the value is a boolean or a text."""
        return isinstance(self.default, bool) and bool(self.choices)

    @property
    def type(self) -> str:
        """The word for the type in help and in the reference, such as "integer" or "duration"."""
        if self.free:
            return "free section"
        if self.is_mixed:
            return "boolean or string"
        return "duration" if self.duration else _TYPE_NAMES[type(self.default)]

    def check(self, value: Any) -> None:
        """Raises UsageError if a value of the default's type is not allowed; the message is one line."""
        if self.choices and value not in self.choices:
            shown = [str(each).lower() if each in (False, True) else each for each in self.choices]
            known = {**{each: each for each in shown}, **self.meant}
            meant = closest(str(value), known)
            hint = f": did you mean {meant}?" if meant else did_you_mean("", shown)
            raise UsageError(f"{self.name} is {value!r}{hint}")
        if self.least is not None and isinstance(self.default, float):
            if not self.least <= value < math.inf:
                raise UsageError(
                    f"{self.name} is {value}, but must be a finite number, at least {self.least}."
                )
        elif self.least is not None and not isinstance(value, str):  # a duration is a text
            self._check_integer(value, self.least)
        if self.bound and not self.bound[0](value):
            raise UsageError(f"{self.name} is {value}, but must be {self.bound[1]}.")
        if self.validate:
            self.validate(self.name, value)

    def _check_integer(self, value: int, least: int) -> None:
        if not least <= value <= self.most:
            limit = f"at least {least}" if value < least else f"at most {self.most}"
            raise UsageError(f"{self.name} is {format_integer(value)}, but must be {limit}.")


Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination of values that cannot compute the right update, or has no effect.

    A rule reads values of config keys, and facts that are known once the trainer is built, such as
    `replicas`. It is not checked as long as one that it reads is not known.

    Attributes:
        broken: returns a true value for values that break the rule.
        reason: why they are rejected; {train.steps} stands for a value, {train.steps!r} for its repr.
        fix: what to change, as an imperative; "" if the reason says it.
    """

    broken: Callable[[Values], Any]
    reason: str
    fix: str = ""

    def __call__(self, values: Values) -> None:
        """Raises UsageError of one line if values break the rule."""
        if self.broken(values):
            raise UsageError(self.message(values))

    def message(self, values: Values) -> str:
        """Returns the line for values that break the rule."""

        def show(match: re.Match[str]) -> str:
            value = values[match[1]]
            return repr(value) if match[2] else str(value)

        text = f"{self.reason}: {self.fix}." if self.fix else f"{self.reason}."
        return re.sub(r"\{([\w.]+)(!r)?\}", show, text)


def check_values(keys: Mapping[str, Key], values: Values) -> None:
    """Checks the value of each key by itself.

    Args:
        keys: the keys, by their full names.
        values: full names of keys -> values, each of the type of its default.

    Raises:
        UsageError: a value is not allowed; the message is one line.
    """
    for name, value in values.items():
        if name in keys:
            keys[name].check(value)


def check_rules(rules: Iterable[Callable[[Values], None]], values: Values, **facts: Any) -> None:
    """Checks the rules about values that depend on each other.

    Args:
        rules: each is called with the known values, and raises UsageError.
        values: full names of keys -> values, of a config or of the options of a trainer.
        **facts: what is known about the trainer and the hardware. A rule that reads something that is
            not known yet is not checked.

    Raises:
        UsageError: a rule is broken; the message is one line.
    """
    known = _Known(values, **facts)
    for rule in rules:
        with contextlib.suppress(_UnknownError):
            rule(known)


class _UnknownError(KeyError):
    pass


class _Known(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise _UnknownError(key)


def format_integer(number: int) -> str:
    """Returns the digits of an integer, or their number if they are too many to print."""
    if abs(number) < 10**MAX_DIGITS:
        return str(number)
    return f"a number of {int(math.log10(abs(number))) + 1} digits"


def check_number(name: str, value: Any, *, zero: bool = False) -> None:
    """Raises UsageError if a value is no finite number greater than 0, or 0 if that is allowed."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or not (value or zero):
        bound = "at least 0" if zero else "greater than 0"
        raise UsageError(f"{name} is {value!r}, but must be a finite number {bound}.")


def check_strings(key: str, elements: Iterable[Any], requirement: str) -> None:
    """Raises UsageError if a list contains something else than texts."""
    for element in elements:
        if not isinstance(element, str) or not element:
            shown = errors.show_value(element)
            raise UsageError(f"{key} contains {shown}, but must contain {requirement}.")
