"""Checks the value of each config key, independently of the other keys.

The same tables check a config file, the command line and a `ctl.TrainerOptions(...)` in a script.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import re
from typing import Any

from ctl import errors, optimizers
from ctl.configs import durations, overrides, parameter_groups
from ctl.errors import UsageError
from ctl.hardware import devices, strategies

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
XLA_MODES = ("auto", "off", "loop", "step", "gradients", "autocluster")
ACTIONS = ("early_stopping",)  # the names in ctl.loop.actions.registry
WRITERS = ("tensorboard", "jsonl", "csv", "mlflow", "wandb")  # in ctl.loop.writers
ON_NON_FINITE = ("stop", "skip", "rollback", "ignore")

_CHOICES = {
    "runtime.strategy": strategies.NAMES,
    "runtime.precision": PRECISIONS,
    "runtime.xla": XLA_MODES,
    "runtime.all_reduce.dtype": ("", "bfloat16"),
    "runtime.all_reduce.compression": ("", "powersgd", "float16", "bfloat16"),
    "runtime.all_reduce.algorithm": strategies.ALGORITHMS,
    "data.placement": ("stream", "device"),
    "train.on_non_finite": ON_NON_FINITE,
    "train.preemption_notice": ("none", "gce"),
    "train.checkpoint_writing": ("auto", "background", "blocking"),
    "train.best.mode": ("", "max", "min"),
    "train.export": ("", "best", "last"),
    "train.early_stopping.mode": ("", "max", "min"),
}
_MINIMUM = {
    "seed": 0,
    "runtime.logical_devices": 0,
    "runtime.logical_shards": 0,
    "runtime.all_reduce.packs": 1,
    "runtime.all_reduce.rank": 0,
    "runtime.all_reduce.compression_start": 0,
    "runtime.gpu.memory_limit_mib": 0,
    "data.global_batch_size": 0,
    "data.per_replica_batch_size": 0,
    "data.prefetch": -1,
    "data.overfit_batches": 0,
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
    "train.best.keep": 1,
    "train.early_stopping.patience": 1,
    "train.summary_interval": 0,
    "summaries.histogram_interval": 0,
    "train.checkpoint_interval": 0,
    "train.checkpoints_to_keep": 1,
    "train.checkpoint_keep_every": 0,
    "eval.interval": 0,
    "eval.global_batch_size": 0,
}
_MAXIMUM = {"seed": 2**32 - 1}  # the largest seed of NumPy
_DEFAULT_MAXIMUM = 2**31 - 1  # TensorFlow holds these numbers as int32
_NOT_NEGATIVE = (
    "runtime.loss_scale",
    "runtime.all_reduce.bucket_mib",
    "runtime.all_reduce.timeout",
    "runtime.cluster.start_timeout",
    "runtime.cluster.heartbeat_timeout",
    "runtime.cluster.shard_mib",
    "optimizer.learning_rate",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "optimizer.ema_decay",
    "optimizer.clip.global_norm",
    "optimizer.clip.norm",
    "optimizer.clip.value",
    "train.checkpoint_seconds",
    "train.summary_seconds",
    "eval.seconds",
    "train.early_stopping.min_delta",
    "train.loss_spike",
    "train.stall_seconds",
    "eval.collect_limit_mib",
)
# Bounds in addition to those above: key -> whether a value is allowed, and what the message requires.
_OTHER_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer.learning_rate": (lambda rate: rate > 0, "greater than 0"),
    "optimizer.momentum": (lambda momentum: momentum < 1, "less than 1, such as 0.9"),
    "optimizer.ema_decay": (lambda decay: decay < 1, "less than 1, such as 0.999"),
    "runtime.cluster.heartbeat_timeout": (lambda seconds: seconds >= 1, "at least 1"),
    "train.loss_spike": (
        lambda factor: factor == 0 or factor > 1,
        "greater than 1, such as 3.0, or 0 for no limit",
    ),
    "data.cache": (
        lambda place: place.lower() not in ("none", "off", "false", "true", "disk"),
        "memory, a folder, or '' for no cache",
    ),
    "data.tfrecord.parallel_calls": (
        lambda count: count != 0,
        "at least 1, or -1 to let tf.data choose",
    ),
}
_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")
_METRICS = ("train.best.metric", "train.early_stopping.metric")
MAX_DIGITS = 99  # in an integer; Python refuses to print integers of thousands of digits


def check_values(values: Mapping[str, Any]) -> None:
    """Checks the value of each key by itself.

    Args:
        values: full names of keys -> values, each of the type of its default.

    Raises:
        UsageError: a value is not allowed; the message is one line.
    """
    for key, value in values.items():
        if key in _CHOICES and value not in _CHOICES[key]:
            raise UsageError(f"{key} is {value!r}{errors.did_you_mean(str(value), _CHOICES[key])}")
        if key in _MINIMUM and not isinstance(value, str):  # a duration is a text
            _check_integer(key, value)
        if key in _NOT_NEGATIVE and not 0.0 <= value < math.inf:
            raise UsageError(f"{key} is {value}, but must be a finite number, at least 0.")
        allowed, requirement = _OTHER_BOUNDS.get(key, (None, ""))
        if allowed and not allowed(value):
            raise UsageError(f"{key} is {value}, but must be {requirement}.")
    for key in _METRICS:
        name = values.get(key, "")
        if name and not re.fullmatch("eval/.+", name):
            raise UsageError(
                f"{key} is {name!r}, but must be the name of a metric of the evaluation, eval/NAME, "
                "such as eval/loss."
            )
    _check_profile(values.get("train.profile", ""))
    if values.get(durations.LIMIT):
        durations.seconds(values[durations.LIMIT])
    _check_actions(values.get("actions", ()))
    _check_writers(values.get("summaries.writers", ()))
    _check_strings("runtime.devices", values.get("runtime.devices", ()), 'names such as "GPU:0"')
    devices.check_names(values.get("runtime.devices", ()))
    if "optimizer.name" in values:
        optimizers.check_name(values["optimizer.name"])
    parameter_groups.check(values)
    _check_splits(values.get("eval.splits", ()))
    _check_strings("init.variables", values.get("init.variables", ()), 'patterns such as "conv*/*"')


def format_integer(number: int) -> str:
    """Returns the digits of an integer, or their number if they are too many to print."""
    if abs(number) < 10**MAX_DIGITS:
        return str(number)
    return f"a number of {int(math.log10(abs(number))) + 1} digits"


def _check_actions(actions: Iterable[Any]) -> None:
    for index, action in enumerate(actions):
        key = f"actions[{index}]"
        name = action.get("name") if isinstance(action, Mapping) else action
        if not isinstance(name, str) or not name:
            raise UsageError(
                f"{key} is {overrides.show_value(action)}, but must be a name, or a dict with a name "
                "and arguments."
            )
        if ":" not in name and name not in ACTIONS:
            raise UsageError(
                f"{key} is {name!r}, but must be path/to/file.py:Class, package.module:Class, or "
                f"{' or '.join(ACTIONS)}."
            )


def _check_profile(steps: str) -> None:
    match = _STEPS.fullmatch(steps)
    if steps and not (match and int(match[1]) < int(match[2])):
        raise UsageError(
            f"train.profile is {steps!r}, but must be FIRST:END with END greater than FIRST, such as "
            "200:210."
        )


def _check_writers(writers: Sequence[Any]) -> None:
    _check_strings("summaries.writers", writers, 'names such as "jsonl"')
    for index, name in enumerate(writers):
        if name in writers[:index]:
            raise UsageError(f"summaries.writers contains {name!r} twice: remove one of them.")
        if ":" not in name and name not in WRITERS:
            raise UsageError(
                f"summaries.writers contains {name!r}{errors.did_you_mean(name, WRITERS)}"
            )


def _check_splits(splits: Sequence[Any]) -> None:
    key = "eval.splits"
    _check_strings(key, splits, 'names such as "test"')
    for index, split in enumerate(splits):
        # The name is also used for a folder of summaries, and in the names of metrics.
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise UsageError(
                f"{key} contains {split!r}, but a name must consist of letters, digits, _, - and dots."
            )
        if split in splits[:index]:
            raise UsageError(f"{key} contains {split!r} twice: remove one of them.")


def _check_strings(key: str, elements: Iterable[Any], requirement: str) -> None:
    for element in elements:
        if not isinstance(element, str) or not element:
            shown = overrides.show_value(element)
            raise UsageError(f"{key} contains {shown}, but must contain {requirement}.")


def _check_integer(key: str, value: int) -> None:
    least, most = _MINIMUM[key], _MAXIMUM.get(key, _DEFAULT_MAXIMUM)
    if value < least:
        raise UsageError(f"{key} is {format_integer(value)}, but must be at least {least}.")
    if value > most:
        raise UsageError(f"{key} is {format_integer(value)}, but must be at most {most}.")
