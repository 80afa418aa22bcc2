"""Selects the checkpoint that the user names by `--checkpoint`."""

import os

from ctl.errors import UsageError, list_some
from ctl.loop.actions import best_checkpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.workdir import Workdir


def find_checkpoint(workdir: Workdir, name: str) -> str | None:
    """Returns the path of a checkpoint of a run.

    Args:
        workdir: the folder of the run.
        name: "best", a step, or a path; "" for the checkpoint whose evaluation is the result of the
            run.

    Returns:
        The path; None for the newest checkpoint that can be read.

    Raises:
        UsageError: there is no such checkpoint.
    """
    if not name:
        return _find_restored(workdir)
    if name == "best":
        return best_checkpoint.find_best(workdir.best)
    folders = [CheckpointFiles(folder) for folder in (workdir.checkpoints, workdir.best)]
    if name.isdecimal():
        for files in folders:
            if int(name) in files.steps():
                return files.path(int(name))
        steps = sorted({step for files in folders for step in files.steps()})
        raise UsageError(
            f"--checkpoint={name}: {workdir.path} has no checkpoint of this step, but of "
            f"{list_some([str(step) for step in steps]) or 'none'}."
        )
    path = name.removesuffix(".index")
    if not os.path.exists(f"{path}.index"):
        raise UsageError(
            f"--checkpoint is {name!r}, but must be best, a step, or a checkpoint's path, such as "
            f"{folders[0].path(1000)}."
        )
    return path


def _find_restored(workdir: Workdir) -> str | None:
    """Returns the best checkpoint if the run ended by restoring it; None otherwise."""
    result = workdir.result()
    steps = CheckpointFiles(workdir.checkpoints).steps()
    # A run that was continued since then has no result yet.
    has_ended = bool(steps) and result.get("step") == steps[-1]
    if has_ended and (result.get("best") or {}).get("restored"):
        return best_checkpoint.find_best(workdir.best)
    return None
