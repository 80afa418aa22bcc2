"""The table of modes: one module or package per `--mode`, and one row in `MODES`.

The flags that a mode accepts are a row of `ctl.configs.flags.MODES`; a test compares both tables.

Each mode is a function of one signature:

    def train(arguments: Arguments) -> int

It builds what it needs (most modes `run.RunParts`), prints what users see, and returns the exit code:
0 done, 1 failed, 75 stopped and saved. It raises `UsageError` for a mistake of the user and `Failure`
for anything else that ends the run; `ctl.main` prints either in one line.
"""

from collections.abc import Callable
import dataclasses
import importlib
import time

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
        topology: the TPU slices to compile for (`--topology`), or "".
        find_batch: search for the largest batch that fits (`--find_batch`).
        checks: the checks to run (`--checks`), separated by commas, or "" for all of them.
        quick: leave out the checks that take the longest (`--quick`).
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
    topology: str = ""
    find_batch: bool = False
    checks: str = ""
    quick: bool = False
    started: float = dataclasses.field(default_factory=time.monotonic)
    dry_run: bool = False


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode, and its properties that `ctl.main` checks before it imports TensorFlow.

    Attributes:
        function: the mode's function as "module:function", relative to `ctl.modes`.
        builds_trainer: whether it imports the config's trainer, and so requires a trainer.
        builds_strategy: whether it builds the config's strategy, and so requires its hardware and
            takes part in the cluster of TF_CONFIG.
        workdir: "resumed" if it starts or resumes the run in the workdir, "read" if it requires a
            run there, "" if it needs none.
    """

    function: str
    builds_trainer: bool = True
    builds_strategy: bool = True
    workdir: str = ""

    def load(self) -> Callable[[Arguments], int]:
        """Imports the mode's function, and with it TensorFlow."""
        module, name = self.function.split(":")
        function: Callable[[Arguments], int]
        function = getattr(importlib.import_module(f"ctl.modes.{module}"), name)
        return function


MODES = {
    "train_and_eval": Mode("train:train_and_eval", workdir="resumed"),
    "train": Mode("train:train", workdir="resumed"),
    "eval": Mode("evaluate:evaluate", workdir="read"),
    "continuous_eval": Mode("evaluate:continuous_eval", workdir="read"),
    "export": Mode("export:export", builds_strategy=False, workdir="read"),
    "check": Mode("check:check"),
    "profile_input": Mode("profile_input:profile_input"),
    "aot_compile": Mode("aot_compile:aot_compile", builds_strategy=False),
    "explain": Mode("explain:explain"),
    "devices": Mode("devices:show_devices", builds_trainer=False, builds_strategy=False),
}
# Not a value of --mode: workers and parameter servers use it, whatever the mode of the run is.
SERVE = Mode("cluster_server:run_server")
