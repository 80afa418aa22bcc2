"""Checks the keys of the sections `train`, `summaries` and `eval` that depend on each other."""

from collections.abc import Mapping
from typing import Any

from ctl.configs import durations, keys, overrides
from ctl.errors import UsageError


def check(values: Mapping[str, Any]) -> None:
    """Raises UsageError if two keys contradict each other, or one has no effect without another.

    Args:
        values: full names of keys -> values, of a complete config.
    """
    _check_rollback_limit(values)
    _check_compression_start(values)
    _check_monitoring(values)
    _check_profile(values)
    _check_summaries(values)


def _check_rollback_limit(values: Mapping[str, Any]) -> None:
    policy = values["train.on_non_finite"]
    default = keys.defaults().train.rollback_limit
    if values["train.rollback_limit"] != default and policy != "rollback":
        raise UsageError(
            f"train.rollback_limit has no effect with train.on_non_finite={policy}: set it to "
            f"{default}, or choose train.on_non_finite=rollback."
        )


def _check_compression_start(values: Mapping[str, Any]) -> None:
    start, steps = values["runtime.all_reduce.compression_start"], values["train.steps"]
    if isinstance(steps, int) and 0 < steps <= start:  # a duration is checked once it is resolved
        raise UsageError(
            f"runtime.all_reduce.compression_start is {start}, but train.steps is {steps}, so no "
            'step is compressed: choose an earlier step, or set runtime.all_reduce.compression="".'
        )


def _check_monitoring(values: Mapping[str, Any]) -> None:
    """Checks the sections that depend on a metric of the evaluation."""
    default = overrides.flatten(keys.defaults())
    for section in ("train.best", "train.early_stopping"):
        metric, mode = values[f"{section}.metric"], values[f"{section}.mode"]
        names = [key for key in values if key.startswith(section) and values[key] != default[key]]
        if names and not metric:
            raise UsageError(
                f"{names[0]} has no effect without {section}.metric: set it, such as "
                f"{section}.metric=eval/loss, or remove {names[0]}."
            )
        if metric and not mode:
            raise UsageError(
                f"{section}.mode is not set: choose max if higher values of {metric} are better, or "
                "min if lower ones are."
            )
    stopping, best = values["train.early_stopping.metric"], values["train.best.metric"]
    if values["train.export"] == "best" and not (
        best or values["train.early_stopping.restore_best"]
    ):
        raise UsageError(
            "train.export=best requires train.best.metric: set it, such as "
            "train.best.metric=eval/loss, or choose train.export=last."
        )
    if (stopping or best) and not values["eval.splits"]:
        raise UsageError(
            f"{stopping or best} requires evaluations, but eval.splits is empty: add a split, or remove "
            "the metric."
        )
    if stopping and durations.is_time(values["eval.interval"]):
        raise UsageError(
            "train.early_stopping counts evaluations, whose number must not depend on the speed of the "
            "machine: set eval.interval in steps, epochs or examples."
        )
    if stopping and not values["eval.interval"]:
        raise UsageError(
            "train.early_stopping has no effect with eval.interval=0, which evaluates only at the end: "
            "set eval.interval."
        )
    if values["train.early_stopping.restore_best"] and best not in ("", stopping):
        raise UsageError(
            f"train.early_stopping.restore_best restores the best {stopping}, but train.best.metric is "
            f"{best}: use one metric, or set train.early_stopping.restore_best=false."
        )


def _check_profile(values: Mapping[str, Any]) -> None:
    profile, steps = values["train.profile"], values["train.steps"]
    # Durations with units are compared once they are resolved, by another call.
    if profile and isinstance(steps, int) and int(profile.partition(":")[2]) > steps:
        raise UsageError(
            f"train.profile is {profile!r}, but must end at train.steps, which is {steps}, or before."
        )


def _check_summaries(values: Mapping[str, Any]) -> None:
    """Checks that summaries which only TensorBoard can show are written for it."""
    if "tensorboard" in values["summaries.writers"]:
        return
    for key, off in {"summaries.histogram_interval": 0, "summaries.graph": False}.items():
        if values[key]:
            raise UsageError(
                f"{key} has no effect without tensorboard in summaries.writers: add it, or set "
                f"{key}={overrides.show_value(off)}."
            )
