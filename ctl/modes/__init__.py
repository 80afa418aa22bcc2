"""The modes of the program: one module or package per row of `ctl.configs.modes.MODES`.

Each mode is a function of one signature:

    def train(arguments: Arguments) -> int

It builds what it needs (most modes a `run.Run`), prints what users see, and returns the exit code:
0 done, 1 failed, 75 stopped and saved. It raises `UsageError` for a mistake of the user and `Failure`
for anything else that ends the run; `ctl.main` prints either in one line.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import Any

from ml_collections import config_dict

from ctl.loop.workdir import Workdir

DONE, FAILED, STOPPED = 0, 1, 75  # exit codes


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line of one run.

    Attributes:
        config: the checked config.
        config_path: the file that it was read from; the trainer's path is relative to it.
        workdir: the folder of the run.
        fresh: move an existing run aside first (`--fresh`).
        allow_config_change: resume although the config changed (`--allow_config_change`).
        allow_partial_restore: resume from a checkpoint that matches the trainer only in part
            (`--allow_partial_restore`).
        checkpoint: the checkpoint to evaluate or export (`--checkpoint`): "best", a step, a path, or ""
            for the checkpoint of the run's result.
        flags: the values of the mode's own flags, by name; None for one that is not given.
        actions: actions in addition to those of the config and the trainer.
        started: when the program started, by `time.monotonic`.
        dry_run: train two steps and keep nothing (`--dry_run`).
    """

    config: config_dict.ConfigDict
    config_path: str
    workdir: Workdir
    fresh: bool = False
    allow_config_change: bool = False
    allow_partial_restore: bool = False
    checkpoint: str = ""
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    actions: Sequence[Callable[[Any], Any]] = ()
    started: float = dataclasses.field(default_factory=time.monotonic)
    dry_run: bool = False
