"""Decides which changes of the config a run may continue with."""

from collections.abc import Iterable, Mapping
import contextlib
import json
import os
from typing import Any

from ctl.configs import durations, group_values, keys, overrides
from ctl.hardware.strategies import STRATEGIES
from ctl.optimizers import schedules

INPUTS = "inputs."  # the section of config.json with the data of each split and the files of `init`
_GROUPS = "optimizer.groups"
_POLICY, _SPIKE = "train.on_non_finite", "train.loss_spike"  # they decide which updates are applied
_BATCH_SIZES = ("data.global_batch_size", "data.per_replica_batch_size")
_ONLY_TRAINING = ("optimizer.", "init.", "train.", INPUTS, *_BATCH_SIZES)


class ConfigChanges:
    """The differences between the saved config of a run and the current one.

    Args:
        saved: the values of config.json, by full name.
        current: the current config, nested. As long as it has a `per_replica_batch_size`, the
            batch sizes are not compared: the global one depends on the number of replicas. Durations
            that still have a unit are not compared either.

    Attributes:
        lines: key -> "key: old -> new".
        harmful: the keys whose change affects the computed updates.
        evaluation: the keys whose change may affect the result of an evaluation.
        harmful_to_evaluation: the keys of `evaluation` that an evaluation is not meant to change.
    """

    def __init__(self, saved: Mapping[str, Any], current: Mapping[str, Any]):
        old = _complete({**overrides.flatten(keys.defaults()), **_rename(saved)})
        # JSON has lists for tuples.
        new = _complete(overrides.flatten(json.loads(json.dumps(dict(current)))))
        changed = [key for key in sorted({*old, *new}) if _differs(key, old, new)]
        self.lines = {key: f"{key}: {_show(old, key)} -> {_show(new, key)}" for key in changed}
        self.harmful = [key for key in changed if not _is_harmless(key, old, new)]
        # An evaluation uses no optimizer, except what its parts do with the weights, and may use other
        # data.
        self.evaluation = [
            key
            for key in changed
            if (key in keys.BY_NAME and keys.BY_NAME[key].evaluated)
            or (key.startswith(INPUTS) and key.split(".")[1] in new["eval.splits"])
            or (key in self.harmful and not _starts_with(key, _ONLY_TRAINING))
        ]
        self.harmful_to_evaluation = [
            key for key in self.evaluation if not _starts_with(key, ("data.", "eval.", INPUTS))
        ]


def changes_updates(key: str, config: Mapping[str, Any]) -> bool:
    """Returns whether changing a key may change the computed updates.

    Args:
        key: its full name.
        config: the current config, nested.
    """
    return not _is_harmless(key, {}, overrides.flatten(config))


def _rename(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that an older ctl has saved, by the names that the keys have now."""
    return {
        keys.RENAMED.get(key, key): value
        for key, value in saved.items()
        if value or key not in keys.REMOVED
    }


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values with all keys of the optimizers of groups."""
    groups = values.get(_GROUPS, [])
    # A damaged config.json may hold anything.
    return values | {_GROUPS: group_values.complete(groups) if isinstance(groups, list) else groups}


def _differs(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if key in _BATCH_SIZES and new.get("data.per_replica_batch_size"):
        return False
    # "90 epochs" is compared once it is resolved: config.json has the number of steps.
    if durations.has_unit(key, new.get(key)):
        return False
    # An older ctl recorded no inputs, and a mode need not read all of them.
    if key.startswith(INPUTS):
        return key in old and key in new and old[key] != new[key]
    if key == "data.dir" and key in old and key in new:
        # The same folder may be named relative to the current folder, or by its full path.
        with contextlib.suppress(ValueError):  # a name that no file system can have
            return os.path.realpath(str(old[key])) != os.path.realpath(str(new[key]))
    return (key in old) != (key in new) or old.get(key) != new.get(key)


def _show(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def _is_harmless(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if key == "train.steps":
        return not _has_schedule_of_all_steps(new)
    policy, factor = old.get(_POLICY), old.get(_SPIKE)
    if key == _POLICY:  # a run that stops has applied the updates that any other policy applies
        return policy == "stop"
    if key == _SPIKE:  # and it would have stopped at a larger spike
        return policy == "stop" and bool(factor) and not 0 < new[_SPIKE] < factor
    if key.startswith(INPUTS):  # the best checkpoint and early stopping compare evaluations
        split, follows = key.split(".")[1], new.get("optimizer.schedule") == "plateau"
        return split not in ("train", "init") and not (new.get("train.best.metric") or follows)
    if key in ("eval.interval", "eval.splits") and new.get("optimizer.schedule") == "plateau":
        return False  # the rate follows a metric of the evaluations
    if key == "runtime.strategy":  # parameter servers update asynchronously
        rows = [STRATEGIES.get(values.get(key, "auto")) for values in (old, new)]
        return not any(row and row.coordinated for row in rows)
    return keys.is_harmless(key)


def _has_schedule_of_all_steps(values: Mapping[str, Any]) -> bool:
    """Returns whether a decay ends at train.steps, because it has no length of its own."""
    own = {name: values.get(f"optimizer.{name}") for name in ("schedule", "decay_steps")}
    others = [group["optimizer"] for group in values.get(_GROUPS, ()) if group.get("optimizer")]
    return any(
        schedules.ends_at_last_step(
            each.get("schedule") or "constant", each.get("decay_steps") or 0
        )
        for each in (own, *others)
    )


def _starts_with(key: str, names: Iterable[str]) -> bool:
    """Returns whether a key is one of the names, or in a section whose name, ending in a dot, is one."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
