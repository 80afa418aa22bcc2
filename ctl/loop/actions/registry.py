"""Makes the actions that a config requires, and those that watch every run.

An action of ctl is a class and a row. Others need no row: `actions` names a subclass of `Action` as
path/to/file.py:Class or package.module:Class.
"""

from collections.abc import Mapping, Sequence
import operator
from typing import Any

from ctl.configs import loading
from ctl.configs.error_location import error_location
from ctl.errors import UsageError
from ctl.loop.actions.action import Action, as_action
from ctl.loop.workdir import Workdir

# Key of the config -> the action that it requires if it is set, or has the value after "=", in the order
# in which they are called.
# The class method `from_config(config, workdir)` makes the action.
CONFIGURED = {
    "summaries.histogram_interval": "ctl.loop.actions.histograms:WeightHistograms",
    "train.best.metric": "ctl.loop.actions.best_checkpoint:BestCheckpoint",
    "optimizer.schedule=plateau": "ctl.loop.actions.plateau:ReduceOnPlateau",
    "train.best.patience": "ctl.loop.actions.stopping:EarlyStopping",
    "train.best.target": "ctl.loop.actions.stopping:StopAtTarget",
    "train.max_duration": "ctl.loop.actions.stopping:TimeLimit",
    "actions": "",  # those that `actions` lists
    "train.export": "ctl.loop.exports:ExportModel",
}
# The actions of every run that trains, after all others. The profiler comes before the watchdog, which
# then does not count the time in which a profile is written.
WATCHING = (
    "ctl.loop.actions.learning_rate:LearningRate",
    "ctl.loop.actions.leaks:Retraces",
    "ctl.loop.actions.leaks:MemoryGrowth",
    "ctl.loop.loop_numbers:LoopNumbers",
    "ctl.loop.goodput:Goodput",
    "ctl.loop.stragglers:Stragglers",
    "ctl.loop.profiler:Profiler",
    "ctl.loop.watchdog:Watchdog",
)
_OPTIONS = ("at", "everywhere")  # of `as_action`; all others are arguments of the class


def make_actions(
    config: Any, config_path: str, *, workdir: Workdir, trains: bool = True
) -> list[Action]:
    """Makes the actions of `summaries` and `train`, then those of `actions`, then the export.

    Args:
        config: a validated config.
        config_path: the config file; the paths of actions are relative to its folder.
        workdir: has the folders of the best checkpoints and the exported models.
        trains: whether the run trains; if not, only the actions of `actions` are made.

    Raises:
        UsageError: an action cannot be made.
    """
    if not trains:
        return _make_listed(config.actions, config_path)
    actions: list[Action] = []
    for key, row in CONFIGURED.items():
        if not row:
            actions += _make_listed(config.actions, config_path)
        elif _is_set(config, key):
            actions.append(loading.load(row).from_config(config, workdir))
    return actions


def _is_set(config: Any, key: str) -> bool:
    name, _, required = key.partition("=")
    value = operator.attrgetter(name)(config)
    return bool(value == required if required else value)


def make_watching(config: Any, workdir: Workdir) -> list[Action]:
    """Makes the actions that watch every run that trains."""
    return [loading.load(row).from_config(config, workdir) for row in WATCHING]


def _make_listed(entries: Sequence[Any], config_path: str) -> list[Action]:
    actions = []
    for index, entry in enumerate(entries):
        key = f"actions[{index}]"
        arguments: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        name = arguments.pop("name")
        options = {option: arguments.pop(option) for option in _OPTIONS if option in arguments}
        factory = loading.load_action_factory(name, config_path, key=key)
        try:
            action = factory(**arguments)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{key} is {name!r}, which fails with the arguments {arguments}: "
                f"{error_location(error)}"
            ) from error
        if not callable(action):
            raise UsageError(
                f"{key} is {name!r}, which does not return an action: name a class, or a function that "
                "returns a callable of the outputs."
            )
        actions.append(as_action(action, **options))
    return actions
