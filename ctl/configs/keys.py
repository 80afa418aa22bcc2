"""The keys and rules of an experiment's config, which the components of ctl declare."""

from collections.abc import Mapping
import functools
from typing import Any

from ml_collections import config_dict

from ctl.configs import component, durations, experiment
from ctl.configs.component import Key, Values
from ctl.hardware import config as hardware
from ctl.loop import config as loop
from ctl.optimizers import config as optimizers
from ctl.parts import config as parts
from ctl.update import config as update

# The modules that declare keys and rules. A key stands after its section. Options of a trainer are in
# `option_keys.COMPONENTS`.
_COMPONENTS = (experiment, hardware, optimizers, loop, update, parts)
_declared: list[Key] = [key for component in _COMPONENTS for key in component.KEYS]
_sections = list(dict.fromkeys(key.name.partition(".")[0] for key in _declared))
KEYS = tuple(sorted(_declared, key=lambda key: _sections.index(key.name.partition(".")[0])))
# Each is called with the known values, and raises UsageError.
RULES = tuple(rule for component in _COMPONENTS for rule in component.RULES)
BY_NAME = {key.name: key for key in KEYS}
durations.ACCEPTS_TIME |= {key.name: key.time for key in KEYS if key.duration}
FREE_SECTIONS = tuple(key.name for key in KEYS if key.free)
# Former name of a key -> its name. A run that was saved with the former name can be resumed.
RENAMED = {
    "optimizer.gradient_accumulation_steps": "optimizer.micro_batches",
    "runtime.fused_attention": "runtime.kernels",
}
# Former key -> what to do instead. A run that was saved with it can be resumed if it had no effect: its
# value was 0, false or empty.
REMOVED = {
    "data.overfit_batches": "run ctl check CONFIG --checks=overfit",
    "train.preemption_notice": "the SIGTERM of the machine's shutdown saves and stops the run",
    "runtime.all_reduce.rank": "set runtime.all_reduce.compression=float16 in place of PowerSGD",
    "runtime.all_reduce.compression_start": "compression is on from the first step, or off",
}


def defaults() -> config_dict.ConfigDict:
    """Returns an unlocked config with every key at its default."""
    config = config_dict.ConfigDict()
    for key in KEYS:
        if key.optional:
            continue
        *path, last = key.name.split(".")
        section = functools.reduce(getattr, path, config)
        if key.default == {}:
            section[last] = config_dict.ConfigDict()
        elif key.duration or key.is_mixed:
            # Of any type, because ConfigDict rejects a string where the default is none.
            section[last] = config_dict.FieldReference(key.default, field_type=object)
        else:
            section[last] = list(key.default) if isinstance(key.default, list) else key.default
    return config


def flatten(config: Mapping[str, Any], path: str = "", *, separator: str = ".") -> dict[str, Any]:
    """Returns the values of a config by the full names of their keys, such as "train.steps"."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping | config_dict.ConfigDict):
            result |= flatten(value, f"{path}{key}{separator}", separator=separator)
        else:
            result[f"{path}{key}"] = value
    return result


def is_harmless(name: str) -> bool:
    """Returns whether a run that is resumed may change a key, by its mark or that of a section of it."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return any(BY_NAME[each].harmless for each in names if each in BY_NAME)


def check_values(values: Values) -> None:
    """Checks the value of each key by itself.

    Args:
        values: full names of keys -> values, each of the type of its default.

    Raises:
        UsageError: a value is not allowed; the message is one line.
    """
    component.check_values(BY_NAME, values)


def check_rules(values: Values, **facts: Any) -> None:
    """Checks the rules about values that depend on each other, as `component.check_rules` does."""
    component.check_rules(RULES, values, **facts)
