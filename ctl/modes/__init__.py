"""One module or package per `--mode`.

Each mode is a function of one signature:

    def train(arguments: Arguments) -> int

It builds what it needs (most modes a `run.Run`), prints what the user sees, and returns the exit code:
0 done, 1 failed, 75 stopped and saved. It raises `UsageError` for a mistake of the user and `Failure`
for anything else that ends the run; `ctl.main` prints either in one line.

Importing this module does not import TensorFlow.
"""

import dataclasses

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
        topology: the TPU slices to compile for (`--topology`), or "".
        find_batch: search for the largest batch that fits (`--find_batch`).
    """

    config: config_dict.ConfigDict
    config_path: str
    workdir: Workdir
    fresh: bool = False
    allow_config_change: bool = False
    allow_partial_restore: bool = False
    topology: str = ""
    find_batch: bool = False
