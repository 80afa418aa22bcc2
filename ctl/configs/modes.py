"""The table of modes, the values of `--mode`; a new mode is a row of `MODES`."""

from collections.abc import Callable
import dataclasses
import gc
import importlib
import sys

from ctl.errors import UsageError, did_you_mean
from ctl.hardware import garbage


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag that one mode has for itself.

    Attributes:
        name: the name.
        text: what it does, for `ctl --help`.
        example: an example of its value; "" for a switch.
        choices: the names of which it accepts one or more, separated by commas; empty for any value.
    """

    name: str
    text: str
    example: str = ""
    choices: tuple[str, ...] = ()

    def check(self, value: str) -> None:
        """Raises UsageError if a value contains a name that is not one of the choices."""
        for name in value.split(",") if value and self.choices else ():
            if name.strip().replace(" ", "_") not in self.choices:
                raise UsageError(f"--{self.name} names {name!r}{did_you_mean(name, self.choices)}")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode, and its properties that `ctl.main` checks before it imports TensorFlow.

    Attributes:
        function: the mode's function as "module:function", relative to `ctl.modes`.
        text: what the mode does, for `ctl --help`.
        flags: the flags that it accepts in addition to --config, with those of its own.
        own: the flags of its own, which reach it as `Arguments.flags`.
        builds_trainer: whether it imports the config's trainer, and so requires a trainer.
        builds_strategy: whether it builds the config's strategy, and so requires its hardware and
            takes part in the cluster of TF_CONFIG.
        workdir: "resumed" if it starts or resumes the run in the workdir, "read" if it requires a
            run there, "" if it needs none.
    """

    function: str
    text: str = ""
    flags: tuple[str, ...] = ()
    own: tuple[Flag, ...] = ()
    builds_trainer: bool = True
    builds_strategy: bool = True
    workdir: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", (*self.flags, *(flag.name for flag in self.own)))

    def load(self) -> Callable[..., int]:
        """Imports the mode's function, and with it TensorFlow."""
        module, name = self.function.split(":")
        is_first = "tensorflow" not in sys.modules
        function: Callable[..., int]
        with garbage.pause_collection():
            function = getattr(importlib.import_module(f"ctl.modes.{module}"), name)
            if is_first:
                gc.freeze()  # what TensorFlow has made lives as long as the process
        return function


_TRAINING = (
    "workdir", "fresh", "allow_config_change", "allow_partial_restore", "dry_run", "sweep",
    "sweep_parallel",
)  # fmt: skip
_RESTORING = ("workdir", "checkpoint", "allow_config_change")
# fmt: off
MODES = {
    "train_and_eval": Mode("train:train_and_eval", flags=_TRAINING, workdir="resumed",
        text="train, and evaluate at intervals and at the end (the default)"),
    "train": Mode("train:train", flags=_TRAINING, workdir="resumed",
        text="train without evaluating"),
    "eval": Mode("evaluate:evaluate", flags=_RESTORING, workdir="read",
        text="evaluate a checkpoint of a run"),
    "continuous_eval": Mode("evaluate:continuous_eval", flags=("workdir", "allow_config_change"),
        text="evaluate each checkpoint of a run as another process writes it", workdir="read"),
    "export": Mode("export:export", flags=_RESTORING, builds_strategy=False, workdir="read",
        text="export a checkpoint of a run, such as a SavedModel"),
    "check": Mode("check:check", own=(
            Flag("checks", "with check: run these of its checks only", "inputs,gradients", (
                "inputs", "data_order", "evaluation_counts", "first_loss", "gradients",
                "one_batch_overfitted", "save_and_restore", "replica_equivalence", "overfit")),
            Flag("quick", "with check: leave out the longest checks, and compare two splits on 2 "
                 "replicas")),
        text="test that the trainer computes the same update on 1, 2 and 4 replicas"),
    "profile_input": Mode("profile_input:profile_input",
        text="measure what limits the training speed, and compare the modes of XLA"),
    "find_lr": Mode("find_lr:find_lr", flags=("workdir",),
        text="train a few steps with a growing learning rate, and suggest one"),
    "find_batch": Mode("find_batch:find_batch", builds_strategy=False,
        text="find the largest global batch that fits into memory, by trying"),
    "aot_compile": Mode("aot_compile:aot_compile", flags=("workdir",), own=(
            Flag("topology", "with aot_compile: the TPU slices, such as v5e:2x2,v5p:2x2x1", "v5e:2x2"),
            Flag("execute", "with aot_compile: run the train step on virtual devices of this CPU, and "
                 "compare it with one device")),
        text="compile the training loop for a TPU, without a TPU", builds_strategy=False),
    "explain": Mode("explain:explain", flags=("workdir",),
        text="print what the config means, with the estimated memory"),
    "devices": Mode("devices:show_devices", builds_trainer=False, builds_strategy=False, own=(
            Flag("replaced", "with devices: list what ctl replaces in TensorFlow and Keras instead"),),
        text="list the devices of this machine"),
}
# fmt: on
# Not a value of --mode: --sweep runs it in place of the mode, which each of its runs has.
SWEEP = Mode("sweep:run")
# Not a value of --mode: workers and parameter servers use it, whatever the mode of the run is.
SERVE = Mode("server:run_server")
