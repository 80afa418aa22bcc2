"""Checks the value of each config key, independently of the other keys.

The same checks apply to a config file, the command line and `ctl.TrainerOptions(...)` in a script.
"""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Any

from ctl import errors, optimizers
from ctl.configs import durations, group_values, overrides
from ctl.configs.keys import BY_NAME
from ctl.errors import UsageError
from ctl.hardware import devices

SERVERS = ("mlflow", "wandb")  # servers of logged values; their packages have the same names
# Name of a writer -> module:class in ctl.loop.writers, where a new writer is a row and a class. The
# controller makes the writer for TensorBoard.
WRITERS = {
    "tensorboard": "",
    "jsonl": "json_lines:JsonLinesWriter",
    "mlflow": "servers:MlflowWriter",
    "wandb": "servers:WandbWriter",
}
# The suffixes of files of weights that `init.checkpoint` may name.
WEIGHT_FILES = (".safetensors", ".h5", ".keras", ".npz")
_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")


def check_values(values: Mapping[str, Any]) -> None:
    """Checks the value of each key by itself.

    Args:
        values: full names of keys -> values, each of the type of its default.

    Raises:
        UsageError: a value is not allowed; the message is one line.
    """
    for name, value in values.items():
        if name in BY_NAME:
            BY_NAME[name].check(value)
    metric = values.get("train.best.metric", "")
    if metric and not re.fullmatch("eval/.+", metric):
        raise UsageError(
            f"train.best.metric is {metric!r}, but must be the name of a metric of the evaluation, "
            "eval/NAME, such as eval/loss."
        )
    for key in ("data.cache", "train.local_dir"):
        errors.check_local(key, values.get(key, ""))
    _check_profile(values.get("train.profile", ""))
    if values.get(durations.LIMIT):
        durations.seconds(values[durations.LIMIT])
    _check_actions(values.get("actions", ()))
    _check_writers(values.get("summaries.writers", ()))
    _check_strings("runtime.devices", values.get("runtime.devices", ()), 'names such as "GPU:0"')
    devices.check_names(values.get("runtime.devices", ()))
    if "optimizer.name" in values:
        optimizers.check_name(values["optimizer.name"])
    group_values.check(values)
    _check_splits(values.get("eval.splits", ()))
    _check_strings("init.variables", values.get("init.variables", ()), 'patterns such as "conv*/*"')


def is_weight_file(path: str) -> bool:
    """Returns whether `init.checkpoint` names a file of weights, by its suffix."""
    return path.endswith(WEIGHT_FILES)


def _check_actions(actions: Iterable[Any]) -> None:
    for index, action in enumerate(actions):
        key = f"actions[{index}]"
        name = action.get("name") if isinstance(action, Mapping) else action
        if not isinstance(name, str) or not name:
            raise UsageError(
                f"{key} is {overrides.show_value(action)}, but must be a name, or a dict with a name "
                "and arguments."
            )
        if ":" not in name:
            raise UsageError(
                f"{key} is {name!r}, but must be path/to/file.py:Class or package.module:Class."
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
                f"summaries.writers contains {name!r}{errors.did_you_mean(name, list(WRITERS))}"
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
