"""Makes the actions that a config requires.

A new action needs no row: `actions` names a subclass of `Action` as path/to/file.py:Class or
package.module:Class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ctl.configs import loading
from ctl.configs.error_location import error_location
from ctl.errors import UsageError
from ctl.loop.actions.action import Action, as_action
from ctl.loop.actions.best_checkpoint import BestCheckpoint
from ctl.loop.actions.histograms import WeightHistograms
from ctl.loop.actions.stopping import EarlyStopping, TimeLimit
from ctl.loop.exports import ExportModel
from ctl.loop.workdir import Workdir

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
    best = config.train.best
    actions: list[Action] = []
    if not trains:
        return _make_listed(config.actions, config_path)
    if config.summaries.histogram_interval:
        actions.append(WeightHistograms(config.summaries.histogram_interval))
    if best.metric:
        rule, options = (
            (best.metric, best.mode),
            {"keep": best.keep, "restore_at_end": best.restore},
        )
        actions.append(BestCheckpoint(*rule, folder=workdir.best, **options))
        if best.patience:
            actions.append(EarlyStopping(*rule, patience=best.patience))
    if config.train.max_duration:
        actions.append(TimeLimit(config.train.max_duration))
    actions += _make_listed(config.actions, config_path)
    if config.train.export:
        actions.append(ExportModel(config.train.export, workdir=workdir))
    return actions


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
