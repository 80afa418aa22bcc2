"""The config of the parts of the update: the key of each part, and its rules."""

from collections.abc import Mapping
from typing import Any

from ctl.configs.component import Key, Rule, check_number, check_strings
from ctl.errors import UsageError, did_you_mean
from ctl.update.config import reduces_in_xla, spec

_FIELDS = ("variables", "learning_rate_scale", "frozen", "frozen_until", "optimizer")  # of a group
_EXAMPLE = 'dict(variables="backbone/*", learning_rate_scale=0.1)'


def _check_patterns(key: str, patterns: Any) -> None:
    check_strings(key, patterns, 'patterns such as "*/bias"')


def _check_groups(key: str, groups: Any) -> None:
    for index, group in enumerate(groups):
        _check_group(f"{key}[{index}]", group)


def _check_group(name: str, group: Any) -> None:
    if not isinstance(group, Mapping):
        raise UsageError(f"{name} is {group!r}, but must be a section such as {_EXAMPLE}.")
    for key in group:
        if key not in _FIELDS:
            raise UsageError(f"{name} has the key {key!r}{did_you_mean(str(key), _FIELDS)}")
    if "variables" not in group:
        raise UsageError(f"{name} has no variables: name them by a pattern, such as {_EXAMPLE}.")
    if not isinstance(group["variables"], str | list | tuple):
        raise UsageError(
            f"{name}.variables is {group['variables']!r}, but must be a pattern or a list of them."
        )
    names = group["variables"]
    _check_patterns(f"{name}.variables", [names] if isinstance(names, str) else names)
    frozen, scale = group.get("frozen", False), group.get("learning_rate_scale")
    if not isinstance(frozen, bool):
        raise UsageError(f"{name}.frozen is {frozen!r}, but must be true or false.")
    until, optimizer = group.get("frozen_until"), group.get("optimizer")
    if isinstance(optimizer, Mapping) and optimizer.get("schedule") == "plateau":
        raise UsageError(
            f"{name}.optimizer.schedule is 'plateau', but only optimizer.schedule may be: name another."
        )
    if frozen == any(value is not None for value in (scale, until, optimizer)):
        raise UsageError(
            f"{name} requires either frozen=True, or learning_rate_scale, frozen_until or optimizer: "
            "set one of them."
        )
    if optimizer is not None:
        _check_optimizer(f"{name}.optimizer", optimizer)
    if until is not None:
        _check_step(f"{name}.frozen_until", until)
    if scale is not None:
        check_number(f"{name}.learning_rate_scale", scale)


def _check_optimizer(name: str, optimizer: Any) -> None:
    if isinstance(optimizer, Mapping):
        from ctl.optimizers.config import KEYS as keys  # of a config alone

        fields = [each.name.removeprefix("optimizer.") for each in keys if each.grouped]
        for key in optimizer:
            if key not in fields:
                raise UsageError(f"{name} has the key {key!r}{did_you_mean(str(key), fields)}")
    elif not (callable(optimizer) or hasattr(optimizer, "apply_gradients")):
        raise UsageError(
            f"{name} is {optimizer!r}, but must be a section such as dict(name='adam', "
            "learning_rate=1e-3); in a script, a tf_keras optimizer or a function that makes one."
        )


def _check_step(name: str, value: Any) -> None:
    if isinstance(value, str):
        from ctl.configs import durations

        durations.check(name, value)
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UsageError(
            f"{name} is {value!r}, but must be a number of steps from 1 to 2147483647, or a text "
            'such as "2 epochs".'
        )


# fmt: off
# The parts are called in this order: norms and histograms describe gradients that the parts before them
# have changed. The last part freezes layers, whose variables the others must know.
KEYS = (
    Key("runtime.all_reduce.compression", "", choices=("", "float16", "bfloat16"),
        option="compression", part="compression:Compression", depends_on_split=True,
        text="With float16 or bfloat16, the gradients are sent in 16 bits, and the rounding errors "
             "are added to the next ones. Updates are then no longer a function of the global batch "
             'alone. With "", this is off.'),
    Key("summaries.histogram_interval", 0, least=0, option="histogram_interval",
        part="histograms:GradientHistograms",
        text="Sets the steps between two histograms of the weights and of the gradients in "
             "TensorBoard. With 0, there are none."),
    Key("train.norms", "", choices=("", "global", "layers"), option="norms", part="norms:Norms",
        text="With global, log the global norms of the gradients (before clipping), the parameters "
             "and the updates, and the shares of zero and non-finite elements of the gradients. "
             "With layers, also write (but do not print) the norms of each variable. Both hold a "
             'copy of the variables during each step. With "", none of them is logged.'),
    Key("optimizer.ema_decay", 0.0, least=0,
        bound=(lambda decay: decay < 1, "less than 1, such as 0.999"), option="ema_decay",
        part="ema:ExponentialMovingAverage", evaluated=True,
        text="Evaluate and export the exponential moving average of the weights, with this decay, "
             "such as 0.999, after a warm-up. With 0, this is off."),
    Key("optimizer.shard_state", False, choices=(False, True, "gradients"), option="shard_state",
        part="sharded_optimizer:ShardedSlots", harmless=True,
        text="Split the optimizer's slot variables, which it keeps for each weight, over the "
             "replicas, to save memory. The updates have the same bits. With gradients, each replica "
             "also keeps only its part of the summed gradients, and norms are summed in another "
             "order."),
    Key("optimizer.groups", [], validate=_check_groups, option="optimizer_groups",
        part="parameter_groups:ParameterGroups", elements="Mapping[str, Any]",
        text="Gives layers another learning rate or another optimizer, or freezes them, always or until "
             "a step. `variables` is a glob of names, or a list of them. The first group that matches "
             'a variable counts: [dict(variables="backbone/*", '
             'learning_rate_scale=0.1, frozen_until="1 epoch"), dict(variables="stem/*", '
             'frozen=True), dict(variables="head/*", optimizer=dict(name="adam", '
             "learning_rate=1e-3))]. In a script, the optimizer is a function that makes one."),
    Key("optimizer.weight_decay_exclude", [], validate=_check_patterns, option="weight_decay_exclude",
        part="parameter_groups:ParameterGroups",
        text='Names the variables without weight decay, as globs of names such as ["*/bias", '
             '"*/gamma", "*/beta"].'),
)
# fmt: on


# These rules also read the fact `own_parts`: whether the user adds parts to the update.
# fmt: off
RULES = (
    Rule(lambda v: v["runtime.all_reduce.compression"] and v["runtime.all_reduce.dtype"],
         "runtime.all_reduce.compression and runtime.all_reduce.dtype both determine how gradients are "
         "sent",
         "set only one of the two"),
    Rule(lambda v: v["runtime.all_reduce.compression"] and v["runtime.precision"] == "float64",
         "runtime.all_reduce.compression would undo runtime.precision=float64",
         "set only one of the two"),
    Rule(lambda v: v["runtime.all_reduce.compression"] and v["runtime.logical_shards"],
         "runtime.logical_shards keeps every bit of the gradients, and runtime.all_reduce.compression "
         "does not",
         "set only one of the two"),
    Rule(lambda v: v["runtime.all_reduce.compression"] and v["runtime.all_reduce.bucket_mib"],
         "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and "
         "runtime.all_reduce.compression after it",
         "set only one of the two"),
    Rule(lambda v: v["optimizer.shard_state"] and not spec(v).replica_values,
         "optimizer.shard_state splits the slot variables that each replica holds, which central "
         "storage and parameter servers hold once; on TPUs it was never run",
         "set optimizer.shard_state=false, or choose runtime.strategy=mirrored or "
         "multi_worker_mirrored"),
    Rule(lambda v: v["optimizer.shard_state"] == "gradients"
                   and (v["runtime.all_reduce.compression"] or v["runtime.logical_shards"]),
         "optimizer.shard_state=gradients, runtime.all_reduce.compression and runtime.logical_shards "
         "each reduce the gradients in a way of their own",
         "set only one of them, or optimizer.shard_state=true"),
    Rule(lambda v: v["optimizer.shard_state"] == "gradients" and v["summaries.histogram_interval"],
         "summaries.histogram_interval writes complete gradients, which no replica has with "
         "optimizer.shard_state=gradients",
         "set it to 0, or optimizer.shard_state=true"),
    Rule(lambda v: v["own_parts"] and v["optimizer.shard_state"] == "gradients",
         "build_parts and transform_gradients get complete gradients, which no replica has with "
         "optimizer.shard_state=gradients",
         "set optimizer.shard_state=true"),
    Rule(lambda v: v["own_parts"] and spec(v).coordinated,
         "build_parts and transform_gradients change the gradients of the global batch, but the workers "
         "of parameter servers compute their steps independently",
         "choose another runtime.strategy, or change them in the optimizer"),
    Rule(lambda v: v["runtime.all_reduce.compression"] and not spec(v).replica_values,
         "runtime.all_reduce.compression keeps errors on each replica, which central storage and "
         "parameter servers cannot; on TPUs it was never run",
         'set runtime.all_reduce.compression="", or choose runtime.strategy=mirrored or '
         "multi_worker_mirrored"),
    Rule(lambda v: v["runtime.all_reduce.compression"] == "bfloat16" and v["cpu_collectives"],
         "runtime.all_reduce.compression=bfloat16 is not supported by TensorFlow's all-reduce between "
         "processes on CPUs",
         "choose runtime.all_reduce.compression=float16, or train on GPUs"),
    Rule(lambda v: reduces_in_xla(v) and v["optimizer.shard_state"],
         "runtime.xla=loop and step compile the update, and optimizer.shard_state gathers variables in "
         "it, for which XLA has no operation in TensorFlow",
         "set optimizer.shard_state=false, or choose runtime.xla=gradients"),
    Rule(lambda v: reduces_in_xla(v)
                   and (v["runtime.all_reduce.dtype"] or v["runtime.all_reduce.compression"]),
         "runtime.xla=loop and step compile the reductions, and TensorFlow adds operands of 16 bits by "
         "a function of float32, which programs of XLA reject",
         "choose runtime.xla=gradients, or reduce in 32 bits"),
    Rule(lambda v: v["optimizer.ema_decay"] and v["runtime.cluster.shard_mib"],
         "optimizer.ema_decay averages complete variables, which another number of parameter servers "
         "could not restore from shards",
         "set runtime.cluster.shard_mib=0, or optimizer.ema_decay=0"),
)
# fmt: on
