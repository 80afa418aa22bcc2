"""Chooses the folder of a run that is started without --workdir."""

from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
import re

from ml_collections import config_dict

from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop.config_changes import ConfigChanges, changes_updates
from ctl.loop.workdir import Workdir

_MAX_NAME = 100  # characters; file systems allow 255 bytes


def choose_folder(
    folder: pathlib.Path,
    config: config_dict.ConfigDict,
    changes: Sequence[tuple[str, str | None]],
    *,
    starts_run: bool,
    allow_change: bool = False,
) -> pathlib.Path:
    """Chooses between the folder of an experiment and one for the changes of the command line.

    A second run of an experiment, with a value that changes the updates, has a folder of its own:
    runs/mnist.learning_rate=0.003 next to runs/mnist. The same command chooses it again, so that it
    resumes the run.

    Args:
        folder: the folder of the experiment, such as runs/mnist.
        config: the config with the changes.
        changes: the changes of the command line, as keys and texts.
        starts_run: whether the program may start a run in the folder; else it reads one, and may
            evaluate other data.
        allow_change: whether the run of the experiment may continue with the changes.

    Returns:
        The folder of the changes if it holds a run, or if the other one holds a run that the changes
        are not compatible with; else the folder of the experiment.
    """
    current = overrides.flatten(config)
    # Parsed values in a fixed order: 5e-1 is 0.5.
    keys = sorted({key for key, _ in changes if changes_updates(key, config)})
    values = {key: str(current[key]) for key in keys}
    if not values:
        return folder
    changed_folder = folder.with_name(f"{folder.name}.{name_values(values)}")
    if Workdir(changed_folder, writes=False).has_run():
        return changed_folder
    experiment = Workdir(folder, writes=False)
    try:
        saved = experiment.config() if experiment.has_run() and not allow_change else None
    except UsageError:  # a damaged file is reported where the folder is used
        saved = None
    if saved is None:
        return folder
    harmful = {
        key
        for key in ConfigChanges(saved, config.to_dict()).harmful
        if starts_run or not key.startswith(("data.", "eval."))
    }
    # A change of the config file is not one of the command line: it is reported as such.
    return changed_folder if harmful and harmful <= values.keys() else folder


def name_values(values: Mapping[str, str]) -> str:
    """Returns a name such as "learning_rate=0.1,dropout=0.5", for a folder."""
    last = [key.rpartition(".")[-1] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    text = ",".join(f"{key}={value}" for key, value in zip(keys, values.values(), strict=True))
    name = re.sub(r"[^\w.,=+-]", "_", text)
    if name == text and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()[:8]
    return f"{name[:_MAX_NAME]}-{digest}"
