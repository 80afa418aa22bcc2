"""Keeps the checkpoints of the best evaluations in a folder of their own."""

from collections.abc import Callable, Mapping
import pathlib
from typing import TYPE_CHECKING, Any

from ctl.errors import Failure, UsageError, print_line
from ctl.loop.actions.monitored_metric import MetricAction, MonitoredMetric
from ctl.loop.checkpoints.checkpointer import Checkpointer, DamagedCheckpoint
from ctl.loop.checkpoints.files import CheckpointFiles, report_write_errors

if TYPE_CHECKING:
    from ctl.loop.controller import Controller
    from ctl.loop.workdir import Workdir


class BestCheckpoint(MetricAction):
    """Saves the trainer after an evaluation that is better than the ones kept so far.

        BestCheckpoint("eval/accuracy", "max", folder="runs/mine/best", keep=1)

    The value is recorded in the marker that makes a checkpoint complete (loop/checkpoints/files.py),
    so that a kill cannot separate the two, and a resumed run needs no state but the folder. If values
    are equal, the first checkpoint is kept. A NaN is never saved.

    Args:
        metric: the name of the metric, such as "eval/accuracy".
        mode: "max" if higher values are better, "min" if lower ones are.
        folder: where to save, apart from the checkpoints of the run.
        keep: how many of the best checkpoints to keep.
        restore_at_end: whether to restore the best checkpoint at the end of training.

    Raises:
        UsageError: an argument has a value that is not allowed.
    """

    everywhere = True  # saving is a collective operation
    may_stop = False

    def __init__(
        self, metric: str, mode: str,
        *, folder: str | pathlib.Path, keep: int = 1, restore_at_end: bool = False,
    ):  # fmt: skip
        super().__init__(metric, mode)
        self._keep = keep
        self._restore_at_end = restore_at_end
        self._folder = pathlib.Path(folder)
        self._checkpoints: Checkpointer

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "BestCheckpoint":
        """Makes the action of a config; see registry.py."""
        return cls(
            config.train.best.metric,
            config.train.best.mode,
            folder=workdir.best,
            keep=config.train.best.keep,
            restore_at_end=config.train.best.restore,
        )

    def begin(self, controller: "Controller") -> None:
        """Creates the checkpointer."""
        super().begin(controller)
        assert controller.checkpoints  # the config's actions run in a workdir
        self._checkpoints = Checkpointer(
            self._folder,
            controller.trainer,
            keep=self._keep,
            is_chief=controller.is_chief,
            has_own_folder=controller.checkpoints.has_own_folder,
            processes=controller.processes,
            rank=self._rank,
        )
        if controller.is_chief:
            name_damaged(self._checkpoints.files, controller.reporter.print_line)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Saves the trainer if the value is better than the worst one that is kept."""
        controller, value = self.controller, self._metric.read(outputs)
        # The chief's files decide for all processes.
        is_new = controller.is_chief and self._is_among_best(value, controller.step)
        if not controller.processes.broadcast_from_chief(int(is_new)):
            return
        path = self._checkpoints.path(controller.step)
        notes = {"metric": self._metric.name, "mode": self._metric.mode, "value": value}
        with report_write_errors(path, self._folder):
            self._checkpoints.save({**notes, "outputs": dict(outputs)})
        controller.reporter.record(
            "best", controller.step, metric=self._metric.name, value=value, path=path
        )

    def end(self) -> None:
        """Restores the best checkpoint, if that was requested."""
        if not self._restore_at_end:
            return
        best = self._best_step() if self.controller.is_chief else None
        step = self.controller.processes.broadcast_from_chief(-1 if best is None else best)
        if step >= 0:
            path = self._checkpoints.path(step)
            try:
                self._checkpoints.restore(path)
            except DamagedCheckpoint as error:
                raise Failure(
                    f"{path} cannot be read ({error}): delete its files, then rerun the same command, "
                    "which restores the next best one."
                ) from None
            outputs = self._checkpoints.files.notes(step).get("outputs")
            self.controller.replace_weights(step, outputs)
            self.controller.reporter.print_line(f"Restored the best checkpoint, of step {step}.")

    def result(self) -> dict[str, Any]:
        """Returns the step and the value of the best checkpoint."""
        values, step = self._values(), self._best_step()
        if step is None:
            return {}
        is_restored = self._restore_at_end and self.controller.has_other_weights
        restored = {"restored": True} if is_restored else {}
        best = {"step": step, "metric": self._metric.name, "value": values[step], **restored}
        return {"best": {**best, "checkpoint": self._checkpoints.path(step)}}

    def _values(self) -> dict[int, float]:
        return _read_values(self._checkpoints.files, self._metric)

    def _is_among_best(self, value: float, step: int) -> bool:
        values = self._values()
        if values.pop(step, None) == value:
            return False  # a resumed run repeats its evaluations
        if len(values) < self._keep:
            return self._metric.is_better(value, None)
        worst = min(values.values(), key=lambda kept: self._metric.sign * kept)
        return self._metric.is_better(value, worst)

    def _best_step(self) -> int | None:
        return max(self._values(), key=self._rank, default=None)

    def _rank(self, step: int) -> tuple[bool, float, int]:
        """Returns the sort key of a checkpoint, from the worst to the best."""
        # Checkpoints of another metric, from before a change of the config, are deleted first.
        values = self._values()
        return (step in values, self._metric.sign * values.get(step, 0.0), -step)


def _read_values(files: CheckpointFiles, metric: MonitoredMetric) -> dict[int, float]:
    """Returns the values of the complete checkpoints that were saved for a metric, by step."""
    notes = {step: files.notes(step) for step in files.steps()}
    rule = {"metric": metric.name, "mode": metric.mode}
    found = {step: n.get("value") for step, n in notes.items() if rule.items() <= n.items()}
    return {step: value for step, value in found.items() if isinstance(value, int | float)}


def name_damaged(files: CheckpointFiles, print_line: Callable[[str], None] = print_line) -> None:
    """Prints which of the best checkpoints are damaged, so that another one takes their place."""
    for step in files.damaged():
        print_line(f"Skipped {files.path(step)}: {files.fault(step)}.")


def find_best(folder: pathlib.Path) -> str:
    """Returns the path of the best checkpoint in a folder that a `BestCheckpoint` has written.

    Raises:
        UsageError: the folder has no checkpoint.
    """
    files = CheckpointFiles(folder)
    name_damaged(files)
    # The newest checkpoint has the current metric, unless the config was changed since.
    for step in reversed(files.steps()):
        notes = files.notes(step)
        if {"metric", "mode", "value"} <= notes.keys():
            metric = MonitoredMetric(notes["metric"], notes["mode"])
            values = _read_values(files, metric)
            return files.path(max(values, key=lambda k: (metric.sign * values[k], -k)))
    raise UsageError(f"{folder} has no checkpoint: set train.best.metric, and train.")
