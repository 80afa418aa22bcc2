"""--mode=export: exports a checkpoint of a run."""

from ctl.configs import loading
from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.loop.actions.export_model import export_checkpoint
from ctl.loop.checkpoints.checkpointer import DamagedCheckpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.named_checkpoint import find_checkpoint
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments
from ctl.modes.experiment import resolve_batch_size
from ctl.trainer import StandardTrainer


def export(arguments: Arguments) -> int:
    """Exports a checkpoint of a run, by default the one of its result; returns the exit code."""
    workdir = arguments.workdir
    path = select_checkpoint(workdir, arguments.checkpoint)
    config = resolve_batch_size(arguments.config, 1)
    try:
        step, exported = export_checkpoint(
            loading.load_trainer_class(config.trainer, arguments.config_path, StandardTrainer),
            TrainerOptions.from_config(config),
            path,
            workdir.exports,
            global_batch_size=config.data.global_batch_size,
        )
    except (DamagedCheckpoint, IndexError) as error:  # TensorFlow's error of a file cut short
        raise UsageError(f"{path} cannot be read ({error}): name another --checkpoint.") from None
    workdir.event("export", step, **exported)
    print(f"Exported {path} to {exported['path']} ({exported['weights']} weights).", flush=True)
    return DONE


def select_checkpoint(workdir: Workdir, name: str) -> str:
    """Returns the path of the checkpoint that the user names, or of the run's result.

    Raises:
        UsageError: there is no such checkpoint.
    """
    path = find_checkpoint(workdir, name)
    files = CheckpointFiles(workdir.checkpoints)
    steps = files.steps()
    if path is None and not steps:
        raise UsageError(f"{workdir.path} has no checkpoint: train first.")
    return path or files.path(steps[-1])
