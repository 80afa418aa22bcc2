"""Exports the trained model when training has ended."""

from collections.abc import Mapping
import pathlib
from typing import Any

from ctl.loop import inference
from ctl.loop.actions import best_checkpoint
from ctl.loop.actions.action import Action
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.exports.version import write_version
from ctl.loop.workdir import Workdir


class ExportModel(Action):
    """Writes the best or the last checkpoint in the formats of `loop/exports/formats.py`.

        ExportModel("best", workdir=Workdir("runs/mine"))

    Args:
        which: "best" or "last".
        workdir: has the folder of the versions, and the best checkpoints.
    """

    at = "train"
    everywhere = True  # does nothing at a boundary; `end` is called everywhere
    may_stop = False

    def __init__(self, which: str, *, workdir: Workdir):
        self._which = which
        self._workdir = workdir
        self._exported: dict[str, str] = {}

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Does nothing before the end."""

    def end(self) -> None:
        """Exports the model in the chief; the other processes wait for it at the end of the run."""
        controller = self.controller
        if not controller.is_chief:
            return
        path = controller.checkpoints.path(controller.trained_step)
        if self._which == "best":
            path = best_checkpoint.find_best(self._workdir.best)
        step, self._exported = export_checkpoint(
            type(controller.trainer),
            controller.trainer.options,
            path,
            self._workdir.exports,
            global_batch_size=controller.trainer.global_batch_size,
        )
        controller.reporter.record("export", step, **self._exported)
        controller.reporter.print_line(f"Exported {path} to {self._exported['path']}.")

    def result(self) -> dict[str, Any]:
        """Returns the path of the model, its checkpoint and the kind of its weights."""
        return {"export": self._exported} if self._exported else {}


def export_checkpoint(
    trainer_class: type,
    options: Any,
    path: str,
    folder: pathlib.Path,
    *,
    global_batch_size: int,
) -> tuple[int, dict[str, str]]:
    """Restores a checkpoint for inference and exports it, with averaged weights if there are any.

    Args:
        trainer_class: the class that was trained.
        options: the options of the training.
        path: the checkpoint.
        folder: the folder of the versions.
        global_batch_size: the batch size of the training.

    Returns:
        The step; and the path of the version, its checkpoint, and the kind of its weights.

    Raises:
        UsageError: the model cannot be exported.
        Failure: it cannot be written.
    """
    trainer = inference.restore_trainer(
        trainer_class, options, path, global_batch_size=global_batch_size
    )
    weights = "average" if options.ema_decay else "plain"
    notes = {"checkpoint": path, "weights": weights}
    with report_write_errors(str(folder), pathlib.Path(path).parent):
        folder.mkdir(parents=True, exist_ok=True)
        version = write_version(trainer, folder, notes)
    return int(trainer.global_step.numpy()), {"path": str(version), **notes}
