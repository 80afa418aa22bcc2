"""Checks a complete config, once, before anything is built.

Values of single keys are checked by values.py, and combinations of a trainer's options by
compatibility.py. This module checks the structure of a config, and other keys that depend on each other.
"""

from collections.abc import Mapping
import functools
import math
import operator
import re
from typing import Any

from ml_collections import config_dict

from ctl import errors, optimizers
from ctl.configs import compatibility, durations, keys, options, overrides
from ctl.configs.compatibility import OPTION_RULES, Choice
from ctl.configs.keys import MAX_DIGITS, format_integer
from ctl.configs.values import check_values, is_weight_file
from ctl.errors import UsageError
from ctl.hardware import tpu
from ctl.optimizers import schedules

_MAX_DEPTH = 50  # of nested sections and lists; far below Python's recursion limit
_ADDRESS = re.compile(r"grpc://[^\s/:,]+:\d{1,5}(,grpc://[^\s/:,]+:\d{1,5})*")
_CLOUD_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def check_config(config: Any) -> None:
    """Checks a complete config.

    Args:
        config: the result of an experiment's `get_config`, with the changes of the command line.

    Raises:
        UsageError: something is wrong; the message is one line that says what, and how to fix it.
    """
    if not isinstance(config, config_dict.ConfigDict):
        raise UsageError(
            f"get_config returned {errors.type_name(config)}: return the result of ctl.config(...)."
        )
    try:
        _check_keys(config)
        values = overrides.flatten(config)
    except RecursionError:
        raise UsageError(
            "The config has a section or a list that contains itself, or too many nested ones: use "
            "plain ones."
        ) from None
    check_values(values)
    for section in keys.FREE_SECTIONS:
        value = functools.reduce(operator.getitem, section.split("."), config)
        _check_model(value, section, sections=(dict, config_dict.ConfigDict))
    if values["init.variables"] and not values["init.checkpoint"]:
        raise UsageError(
            "init.variables has no effect without init.checkpoint: set init.checkpoint to the run "
            "that the variables are from, or remove init.variables."
        )
    if (config.init.names or values["init.layout"]) and not is_weight_file(
        values["init.checkpoint"]
    ):
        raise UsageError(
            "init.names and init.layout have no effect without a file of weights: set init.checkpoint "
            "to one, or remove them."
        )
    if values["init.averages"] and not (values["init.checkpoint"] or config.init.models):
        raise UsageError(
            "init.averages has no effect without init.checkpoint or init.models: set one of them to the "
            "run that the averages are from, or set init.averages=False."
        )
    for name, source in config.init.models.items():
        if not isinstance(source, str) or not source:
            raise UsageError(
                f"init.models.{name} is {overrides.show_value(source)}, but must be a run's workdir, "
                "its folder of checkpoints, or a checkpoint."
            )
    _check_batch(values)
    _check_optimizer(values)
    _check_group_optimizers(config, values)
    options.check_clip(values)
    check_runtime(values)
    check_steps(values)
    _check_monitoring(values)
    _check_effects(values)
    _check_model(config.actions, "actions", sections=(dict,))
    _check_trainer(values["trainer"])


def check_steps(values: Mapping[str, Any]) -> None:
    """Checks the numbers of steps that depend on each other.

    Durations with units are compared only by a second call, with the durations resolved.

    Args:
        values: full names of keys -> values, of a complete config.

    Raises:
        UsageError: two keys contradict each other; the message is one line.
    """
    schedules.check(values)
    durations.check_boundaries(values)
    steps, warmup = values["train.steps"], values["optimizer.warmup_steps"]
    if not isinstance(steps, int):
        return
    ends = schedules.ends_at_last_step(
        values["optimizer.schedule"], values["optimizer.decay_steps"]
    )
    if isinstance(warmup, int) and warmup >= steps and ends:
        raise UsageError(
            f"optimizer.warmup_steps is {warmup}, but must be less than train.steps, which is {steps}."
        )
    profile = values["train.profile"]
    if profile and int(profile.partition(":")[2]) > steps:
        raise UsageError(
            f"train.profile is {profile!r}, but must end at train.steps, which is {steps}, or before."
        )


def check_runtime(values: Mapping[str, Any]) -> None:
    """Checks which keys of the section `runtime` may be combined.

    Args:
        values: full names of keys -> values, of a complete config.

    Raises:
        UsageError: two keys contradict each other; the message is one line.
    """
    _check_tpu(values)
    count = values["runtime.logical_devices"]
    if count > 1 and values["runtime.strategy"] == "one_device":
        raise UsageError(
            f"runtime.logical_devices is {count}, but runtime.strategy=one_device uses one device: "
            "set runtime.logical_devices=0, or choose runtime.strategy=mirrored."
        )
    compatibility.check(Choice.of(values), OPTION_RULES)


def _check_keys(config: config_dict.ConfigDict) -> None:
    """Checks that the config has every key, no others, and values of the right types."""
    overrides.config(**dict(config.items()))
    values = overrides.flatten(config)
    for name in overrides.flatten(keys.defaults()):
        if name not in values:
            raise UsageError(
                f"The config has no {name}: let get_config start from ctl.config(...), which sets "
                "every key, and change its keys one by one."
            )
    for name in keys.FREE_SECTIONS:  # `flatten` does not show an empty one
        section: Any = config
        for part in name.split("."):
            section = section.get(part)
        if not isinstance(section, config_dict.ConfigDict):
            raise UsageError(
                f"The config has no section {name}: set its keys by config.{name}.KEY = VALUE."
            )


def _check_model(value: Any, name: str, *, sections: Any, depth: int = 0) -> None:
    """Checks that the experiment's own keys can be written to config.json, read and compared.

    Args:
        value: the value of a key, or a part of it.
        name: its full name.
        sections: the types that a section may have at this place.
        depth: the number of sections and lists around it.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"{name[:40]}... has more than {_MAX_DEPTH} nested sections or lists, or contains itself: "
            "use fewer."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is {value}, but must be a finite number.")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise UsageError(f"{name} is {format_integer(value)}, but must have at most {MAX_DIGITS}.")
    if isinstance(value, sections):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{name} has the key {key!r}, but its keys must be strings.")
            _check_model(value[key], f"{name}.{key}", sections=sections, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            # ConfigDict.to_dict() does not convert a ConfigDict in a list.
            _check_model(element, f"{name}[{index}]", sections=(dict,), depth=depth + 1)
    elif not isinstance(value, bool | int | float | str | None):
        raise UsageError(
            f"{name} is {errors.type_name(value)}, but the workdir can store only numbers, strings, "
            "booleans, None, and lists and sections of these."
        )


def _check_batch(values: Mapping[str, Any]) -> None:
    total, per_replica = values["data.global_batch_size"], values["data.per_replica_batch_size"]
    if total and per_replica:
        raise UsageError(
            f"data.global_batch_size is {total} and data.per_replica_batch_size is {per_replica}: "
            "set one of them, and the other to 0."
        )
    if not total and not per_replica:
        raise UsageError(
            "Neither data.global_batch_size nor data.per_replica_batch_size is set: set one of "
            "them."
        )


def _check_optimizer(values: Mapping[str, Any]) -> None:
    name, momentum = values["optimizer.name"], values["optimizer.momentum"]
    known = name in optimizers.CLASSES  # a user's own function may have any argument
    if momentum and known and name not in optimizers.MOMENTUM:
        raise UsageError(
            f"optimizer.momentum is {momentum}, but has no effect with optimizer.name={name}: set it "
            "to 0, or choose optimizer.name=sgd."
        )
    if values["optimizer.ema_decay"] and values["runtime.cluster.shard_mib"]:
        raise UsageError(
            "optimizer.ema_decay averages complete variables, which another number of parameter servers "
            "could not restore from shards: set runtime.cluster.shard_mib=0, or optimizer.ema_decay=0."
        )
    if values["optimizer.shard_state"] and known and name not in optimizers.ELEMENTWISE:
        raise UsageError(
            f"optimizer.shard_state updates slices of variables, and optimizer.name={name} requires "
            "complete ones: set optimizer.shard_state=false, or choose optimizer.name="
            f"{', '.join(optimizers.ELEMENTWISE[:-1])} or {optimizers.ELEMENTWISE[-1]}."
        )
    decays = values["optimizer.weight_decay"] or name in optimizers.LAYERWISE
    decays = decays or any(group.get("optimizer") for group in values["optimizer.groups"])
    if values["optimizer.weight_decay_exclude"] and known and not decays:
        raise UsageError(
            "optimizer.weight_decay_exclude has no effect without optimizer.weight_decay: set it, or "
            "remove optimizer.weight_decay_exclude."
        )
    # Each update also subtracts this fraction of every weight; from 1 on, it reverses their signs.
    decay, rate = values["optimizer.weight_decay"], values["optimizer.learning_rate"]
    if decay * rate >= 1:
        raise UsageError(
            f"optimizer.weight_decay is {decay} and optimizer.learning_rate is {rate}: their product, "
            "the fraction of each weight that an update subtracts, must be less than 1."
        )


def _check_group_optimizers(config: config_dict.ConfigDict, values: Mapping[str, Any]) -> None:
    """Checks each optimizer of `optimizer.groups` as if it were that of the config."""
    for index, group in enumerate(values["optimizer.groups"]):
        if group.get("optimizer") is None:
            continue
        name = f"optimizer.groups[{index}].optimizer"
        if not isinstance(group["optimizer"], Mapping):
            raise UsageError(
                f"{name} is {errors.type_name(group['optimizer'])}, but must be a section such as "
                "dict(name='adam', learning_rate=1e-3)."
            )
        _check_model(group["optimizer"], name, sections=(dict,))
        shard_state = values["optimizer.shard_state"]
        section = dict(group["optimizer"]) | {"shard_state": shard_state}
        try:
            other = overrides.config(**{**config.to_dict(), "optimizer": section})
            check_values(overrides.flatten(other))
            _check_optimizer(overrides.flatten(other))
            check_steps(overrides.flatten(other))
        except UsageError as error:
            raise UsageError(f"In {name}: {error}") from None


def _check_tpu(values: Mapping[str, Any]) -> None:
    name, strategy = values["runtime.tpu"], values["runtime.strategy"]
    if name and strategy not in ("tpu", "auto"):
        raise UsageError(
            f"runtime.tpu has no effect with runtime.strategy={strategy}: remove it, or choose "
            "runtime.strategy=auto."
        )
    if name == "local":
        raise UsageError("runtime.tpu is local: remove it to use the TPU of this machine.")
    if name and not any(form.fullmatch(name) for form in (_ADDRESS, _CLOUD_NAME, tpu.RESOURCE)):
        raise UsageError(
            f"runtime.tpu is {name!r}, but must be a name of lower-case letters, digits and hyphens, "
            "projects/PROJECT/locations/ZONE/nodes/NAME, or grpc://HOST:PORT."
        )
    if (name or strategy == "tpu") and values["runtime.logical_devices"]:
        raise UsageError("runtime.logical_devices has no effect on a TPU: set it to 0.")


def _check_trainer(trainer: str) -> None:
    if not trainer:
        raise UsageError(
            "trainer is not set: name a class, as path/to/file.py:Class or package.module:Class."
        )
    path, _, name = trainer.rpartition(":")
    is_module = all(part.isidentifier() for part in path.split("."))
    if not (name.isidentifier() and (is_module or path.endswith(".py"))):
        raise UsageError(
            f"trainer is {trainer!r}, but must be path/to/file.py:Class or package.module:Class."
        )


def _check_monitoring(values: Mapping[str, Any]) -> None:
    """Checks the section `train.best`, which depends on a metric of the evaluation."""
    default = overrides.flatten(keys.defaults())
    metric, interval = values["train.best.metric"], values["eval.interval"]
    names = [k for k in values if k.startswith("train.best.") and values[k] != default[k]]
    if names and not metric:
        raise UsageError(
            f"{names[0]} has no effect without train.best.metric: set it, such as "
            f"train.best.metric=eval/loss, or remove {names[0]}."
        )
    if metric and not values["train.best.mode"]:
        raise UsageError(
            f"train.best.mode is not set: choose max if higher values of {metric} are better, or min "
            "if lower ones are."
        )
    if values["train.export"] == "best" and not metric:
        raise UsageError(
            "train.export=best requires train.best.metric: set it, such as "
            "train.best.metric=eval/loss, or choose train.export=last."
        )
    if metric and not values["eval.splits"]:
        raise UsageError(
            f"{metric} requires evaluations, but eval.splits is empty: add a split, or remove the "
            "metric."
        )
    if values["train.best.patience"] and durations.is_time(interval):
        raise UsageError(
            "train.best.patience counts evaluations, whose number must not depend on the speed of the "
            "machine: set eval.interval in steps, epochs or examples."
        )
    if values["train.best.patience"] and not interval:
        raise UsageError(
            "train.best.patience has no effect with eval.interval=0, which evaluates only at the end: "
            "set eval.interval."
        )


def _check_effects(values: Mapping[str, Any]) -> None:
    """Rejects keys that have no effect, because another key turns off what they set."""
    default = overrides.flatten(keys.defaults())
    has_tensorboard = "tensorboard" in values["summaries.writers"]
    has_interval = values["train.checkpoint_interval"] != 0
    for name, condition, is_met in (
        ("summaries.histogram_interval", "tensorboard in summaries.writers", has_tensorboard),
        ("train.summary_interval", "tensorboard in summaries.writers", has_tensorboard),
        ("train.checkpoint_keep_every", "train.checkpoint_interval", has_interval),
    ):
        if not is_met and values[name] != default[name]:
            raise UsageError(f"{name} has no effect without {condition}: set it, or remove {name}.")
