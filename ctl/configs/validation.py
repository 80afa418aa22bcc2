"""Refuses a config that cannot be right, before anything is built. Loads no TensorFlow."""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

from ml_collections import config_dict

from ctl import errors
from ctl.configs import defaults, overrides
from ctl.configs.options import NON_FINITE
from ctl.errors import UsageError
from ctl.hardware import devices, strategies

_CHOICES = {
    "runtime.strategy": strategies.NAMES,
    "runtime.precision": ("float32", "float64", "bfloat16", "float16"),
    "runtime.xla": ("auto", "off", "loop", "step", "gradients", "autocluster"),
    "runtime.all_reduce.dtype": ("", "bfloat16"),
    "runtime.all_reduce.algorithm": strategies.ALGORITHMS,
    "data.placement": ("stream", "device"),
    "train.on_non_finite": NON_FINITE,
    "train.preemption_notice": ("none", "gce"),
    "train.checkpoint_writing": ("auto", "background", "blocking"),
    "optimizer.name": ("adam", "adamw", "sgd", "rmsprop", "adagrad", "lion"),
    "optimizer.schedule": ("constant", "cosine"),
}
_AT_LEAST = {
    "seed": 0,
    "runtime.logical_devices": 0,
    "runtime.logical_shards": 0,
    "runtime.all_reduce.packs": 1,
    "runtime.gpu.memory_limit_mib": 0,
    "data.global_batch_size": 0,
    "data.per_replica_batch_size": 0,
    "data.prefetch": -1,
    "data.tfrecord.interleave": 1,
    "data.tfrecord.parallel_calls": -1,
    "data.tfrecord.shuffle_buffer": 0,
    "optimizer.learning_rate_batch_size": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.decay_steps": 0,
    "optimizer.gradient_accumulation_steps": 1,
    "train.steps": 1,
    "train.steps_per_loop": 1,
    "train.rollback_limit": 1,
    "train.checkpoint_interval": 0,
    "train.checkpoints_to_keep": 1,
    "train.checkpoint_keep_every": 0,
    "eval.interval": 0,
    "eval.global_batch_size": 0,
}
_DEEPEST = 50  # sections and lists in each other, far below what Python's recursion bears
_TOO_LONG = 10**99
_LARGEST = 2**31 - 1  # what an int32 of TensorFlow holds
_AT_MOST = {"seed": 2**32 - 1}  # what numpy's seed holds
_NOT_NEGATIVE = (
    "runtime.loss_scale",
    "train.checkpoint_seconds",
    "train.loss_spike",
    "runtime.all_reduce.timeout",
    "runtime.cluster.start_timeout",
    "runtime.cluster.shard_mib",
    "optimizer.learning_rate",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "optimizer.clip.global_norm",
    "optimizer.clip.norm",
    "optimizer.clip.value",
    "train.stall_seconds",
)
_TPU_KEYS = tuple(f"runtime.tpu.{key}" for key in ("name", "zone", "project", "address"))
_ADDRESS = re.compile(r"grpc://[^\s/:,]+:\d{1,5}(,grpc://[^\s/:,]+:\d{1,5})*")
_CLOUD_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def check_config(config: Any) -> None:
    """Checks a whole config.

    Args:
        config: what an experiment's `get_config` returned, with the command line's changes.

    Raises:
        UsageError: something in it is wrong; one line says what and what to do.
    """
    if not isinstance(config, config_dict.ConfigDict):
        raise UsageError(
            f"get_config returned {errors.type_name(config)}: let it return what ctl.config(...) "
            "returns."
        )
    try:
        _check_keys(config)
        values = overrides.flat(config)
    except RecursionError:
        raise UsageError(
            "The config has a section or a list that holds itself, or too many in each other: want "
            "plain ones."
        ) from None
    check_values(values)
    _check_model(config.model, "model", sections=(dict, config_dict.ConfigDict))
    _check_init(values)
    _check_batch(values)
    _check_optimizer(values)
    check_runtime(values)
    _check_non_finite(values)
    _check_trainer(values["trainer"])


def check_values(values: Mapping[str, Any]) -> None:
    """Checks what each key by itself may be, whatever the others are.

    Args:
        values: by their full names, of the right types.
    """
    for name, choices in _CHOICES.items():
        _check_choice(name, values[name], choices)
    for name, least in _AT_LEAST.items():
        if values[name] < least:
            raise UsageError(f"{name} is {_shown(values[name])}, want {least} or more.")
        most = _AT_MOST.get(name, _LARGEST)
        if values[name] > most:
            raise UsageError(f"{name} is {_shown(values[name])}, want {most} or less.")
    for name in _NOT_NEGATIVE:
        if not 0.0 <= values[name] < math.inf:
            raise UsageError(f"{name} is {values[name]}, want a finite number, 0 or more.")
    for device in values["runtime.devices"]:
        if not isinstance(device, str):
            shown = overrides.shown(device)
            raise UsageError(f'runtime.devices has {shown}, want names such as "GPU:0".')
    devices.check_names(values["runtime.devices"])
    _check_patterns(values["init.variables"])
    if values["optimizer.learning_rate"] == 0.0:
        raise UsageError("optimizer.learning_rate is 0.0: nothing would be learned, want more.")
    if values["optimizer.momentum"] >= 1.0:
        raise UsageError(
            f"optimizer.momentum is {values['optimizer.momentum']}, want less than 1, such as 0.9."
        )
    if values["data.tfrecord.parallel_calls"] == 0:
        raise UsageError(
            "data.tfrecord.parallel_calls is 0, want 1 or more, or -1 to let tf.data choose."
        )


def _check_patterns(patterns: Sequence[Any]) -> None:
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            shown = overrides.shown(pattern)
            raise UsageError(f'init.variables has {shown}, want patterns such as "conv*/*".')


def _check_init(values: Mapping[str, Any]) -> None:
    if values["init.variables"] and not values["init.checkpoint"]:
        raise UsageError(
            "init.variables has no effect without init.checkpoint: name the run to take them from, "
            "or leave it out."
        )


def _check_keys(config: config_dict.ConfigDict) -> None:
    """Names and types are right, and every key is there."""
    overrides.config(**dict(config.items()))
    found = overrides.flat(config)
    for name in overrides.flat(defaults.defaults()):
        if name not in found:
            raise UsageError(
                f"The config has no {name}: let get_config start from ctl.config(...), which has "
                "every key, and change its keys one by one."
            )
    if not isinstance(config.get("model"), config_dict.ConfigDict):
        raise UsageError("The config has no section model: set its keys, config.model.KEY = VALUE.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise UsageError(f"{name} is {value!r}{errors.did_you_mean(value, choices)}")


def _shown(number: int) -> str:
    """A number, as far as anybody reads it; of a very long one Python refuses to make a string."""
    if abs(number) < _TOO_LONG:
        return str(number)
    return f"a number of {int(math.log10(abs(number))) + 1} digits"


def _check_model(value: Any, name: str, *, sections: Any, depth: int = 0) -> None:
    """The experiment's own keys can be written to the workdir, read again and compared.

    Args:
        value: of a key, or a part of it.
        name: its full name.
        sections: the types that a section may be of here.
        depth: how many sections and lists it is in.
    """
    if depth > _DEEPEST:
        raise UsageError(
            f"{name[:40]}... goes on for more than {_DEEPEST} sections or lists in each other: want "
            "fewer, and none in itself."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is {value}, want a finite number.")
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        raise UsageError(f"{name} is {_shown(value)}, want fewer than 100.")
    if isinstance(value, sections):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{name} has the key {key!r}, want strings as keys.")
            _check_model(value[key], f"{name}.{key}", sections=sections, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            # ConfigDict.to_dict() leaves those in a list as they are.
            _check_model(element, f"{name}[{index}]", sections=(dict,), depth=depth + 1)
    elif not isinstance(value, bool | int | float | str | None):
        raise UsageError(
            f"{name} is {errors.type_name(value)}: want numbers, strings, booleans, None, and "
            "lists and sections of these, which the workdir can keep."
        )


def _check_batch(values: dict[str, Any]) -> None:
    whole, share = values["data.global_batch_size"], values["data.per_replica_batch_size"]
    if whole and share:
        raise UsageError(
            f"data.global_batch_size is {whole} and data.per_replica_batch_size is {share}: set "
            "one of them, and the other to 0."
        )
    if not whole and not share:
        raise UsageError(
            "Neither data.global_batch_size nor data.per_replica_batch_size is set: set one of "
            "them."
        )


def _check_optimizer(values: dict[str, Any]) -> None:
    name = values["optimizer.name"]
    momentum = values["optimizer.momentum"]
    if momentum and name not in ("sgd", "rmsprop"):
        raise UsageError(
            f"optimizer.momentum is {momentum} and has no effect on {name}: set it to 0, or choose "
            "optimizer.name=sgd."
        )
    if values["optimizer.nesterov"] and not (name == "sgd" and momentum):
        raise UsageError(
            "optimizer.nesterov has no effect but with optimizer.name=sgd and optimizer.momentum: "
            "set them, or nesterov to false."
        )
    _check_schedule(values)
    clips = [f"optimizer.clip.{rule}" for rule in ("global_norm", "norm", "value")]
    clips = [clip for clip in clips if values[clip]]
    if len(clips) > 1:
        raise UsageError(f"{' and '.join(clips)} are set: set one of them, and the others to 0.")


def _check_non_finite(values: dict[str, Any]) -> None:
    policy, spike = values["train.on_non_finite"], values["train.loss_spike"]
    if 0.0 < spike <= 1.0:
        raise UsageError(
            f"train.loss_spike is {spike}, want more than 1, such as 3.0: so many times the median."
        )
    if spike and policy == "ignore":
        raise UsageError(
            "train.loss_spike has no effect with train.on_non_finite=ignore: set it to 0, or choose "
            "stop, skip or rollback."
        )
    default = overrides.flat(defaults.defaults())["train.rollback_limit"]
    if values["train.rollback_limit"] != default and policy != "rollback":
        raise UsageError(
            f"train.rollback_limit has no effect with train.on_non_finite={policy}: set it to "
            f"{default}, or choose rollback."
        )


def _check_schedule(values: dict[str, Any]) -> None:
    warmup, steps = values["optimizer.warmup_steps"], values["train.steps"]
    if values["optimizer.schedule"] == "constant":
        for key in ("optimizer.warmup_steps", "optimizer.decay_steps"):
            if values[key]:
                raise UsageError(
                    f"{key} is {values[key]} and has no effect with a constant rate: set it to 0, "
                    "or choose optimizer.schedule=cosine."
                )
    elif warmup >= steps:
        raise UsageError(
            f"optimizer.warmup_steps is {warmup}, want less than train.steps, which is {steps}."
        )


def check_runtime(values: Mapping[str, Any]) -> None:
    """Checks what the keys of `runtime` may be together.

    Args:
        values: of the whole config, by their full names.
    """
    _check_tpu(values)
    _check_gpu(values)
    count = values["runtime.logical_devices"]
    if count > 1 and values["runtime.strategy"] == "one_device":
        raise UsageError(
            f"runtime.logical_devices is {count} and runtime.strategy is one_device, which uses "
            "one: set logical_devices to 0, or choose runtime.strategy=mirrored."
        )
    if values["data.placement"] == "device" and values["runtime.xla"] != "loop":
        raise UsageError(
            "data.placement=device needs runtime.xla=loop, which reads examples on the device: set "
            "it, or data.placement=stream."
        )
    precision = values["runtime.precision"]
    if values["runtime.loss_scale"] and precision != "float16":
        raise UsageError(
            f"runtime.loss_scale has no effect with runtime.precision={precision}: set it to 0."
        )


def _check_tpu(values: Mapping[str, Any]) -> None:
    name, zone, project, address = (values[key] for key in _TPU_KEYS)
    found = [key for key in _TPU_KEYS if values[key]]
    strategy = values["runtime.strategy"]
    if found and strategy not in ("tpu", "auto"):
        raise UsageError(
            f"{found[0]} has no effect with runtime.strategy={strategy}: leave it out, or choose "
            "runtime.strategy=auto."
        )
    if name and address:
        raise UsageError(
            f"runtime.tpu.name is {name} and runtime.tpu.address is {address}: set one of them."
        )
    if (zone or project) and not name:
        raise UsageError(f"{found[0]} says where a TPU by name is: set runtime.tpu.name, too.")
    if address and not _ADDRESS.fullmatch(address):
        raise UsageError(f"runtime.tpu.address is {address!r}, want grpc://HOST:PORT.")
    if name == "local":
        raise UsageError("runtime.tpu.name is local: leave it out for the TPU of this machine.")
    if name and not _CLOUD_NAME.fullmatch(name):
        raise UsageError(
            f"runtime.tpu.name is {name!r}, want a name of lower-case letters, digits and hyphens."
        )
    if (found or strategy == "tpu") and values["runtime.logical_devices"]:
        raise UsageError("runtime.logical_devices has no effect on a TPU: set it to 0.")


def _check_gpu(values: Mapping[str, Any]) -> None:
    off = {"runtime.gpu.memory_growth": "false", "runtime.gpu.memory_limit_mib": "0"}
    found = [key for key in off if values[key]]
    if not found:
        return
    key = found[0]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} are set: set one of them.")
    if values["runtime.logical_devices"]:
        raise UsageError(
            f"runtime.logical_devices gives each part of a GPU its memory, and {key} is set: set "
            f"logical_devices to 0, or {key} to {off[key]}."
        )
    if values["runtime.strategy"] == "tpu" or any(values[name] for name in _TPU_KEYS):
        raise UsageError(f"{key} has no effect on a TPU: set it to {off[key]}.")


def _check_trainer(trainer: str) -> None:
    if not trainer:
        raise UsageError(
            "trainer is not set: name a class, as path/to/file.py:Class or package.module:Class."
        )
    path, _, name = trainer.rpartition(":")
    module = all(part.isidentifier() for part in path.split("."))
    if not (name.isidentifier() and (module or path.endswith(".py"))):
        raise UsageError(
            f"trainer is {trainer!r}, want path/to/file.py:Class or package.module:Class."
        )
