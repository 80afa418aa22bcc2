"""Decides when a run saves a checkpoint, and records it."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from ctl.built.inner_loop import step_of
from ctl.errors import Failure
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import read_notes, report_write_errors
from ctl.loop.reporter import Reporter
from ctl.loop.timing import Every, Timer
from ctl.trainer import StandardTrainer
from ctl.update.non_finite import first_non_finite_variable


@dataclasses.dataclass(eq=False)
class CheckpointManager:
    """Saves each step at most once, and no step whose weights are not finite.

        manager = CheckpointManager(trainer, checkpoints, reporter, Every(500))
        manager.all_restore()
        while training:
            ...
            if manager.all_due(processes):
                manager.save()
        manager.wait()

    Every process of a run must call `all_restore`, `all_due`, `save` and `wait` in the same
    order.

    Args:
        trainer: what is saved.
        checkpoints: reads and writes the checkpoints; None to save nothing.
        reporter: records the checkpoints, and prints which ones are skipped, and why.
        every: when to save; by default at the end only.

    Attributes:
        saved_step: the step of the newest checkpoint that this process saved or restored, or None.
    """

    trainer: StandardTrainer
    checkpoints: Checkpointer | None
    reporter: Reporter
    every: Every = Every()  # noqa: RUF009 - it is frozen
    saved_step: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        # The time to the first checkpoint counts from the start of the process.
        self._timer = Timer(self.every.seconds)

    def all_due(self, processes: ProcessGroup) -> bool:
        """Returns whether to save now, by the interval or by the chief's clock; collective."""
        is_multiple = self.every.next(self._step - 1) == self._step
        return is_multiple or self._timer.all_due(processes)

    def save(self, get_notes: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Saves a checkpoint, unless this step has one already.

        Args:
            get_notes: returns what to record with it besides the trainer, in JSON types.

        Raises:
            Failure: it cannot be written, or a weight is not finite.
        """
        step = self._step
        if self.checkpoints is None or self.saved_step == step:
            return
        # A step may make weights infinite with finite gradients. Saving them would replace the
        # checkpoint to go back to.
        if self.trainer.options.on_non_finite != "ignore":
            trained = step_of(self.trainer).attributes.trained_variables()
            variable = first_non_finite_variable(trained)
            if variable:
                raise Failure(
                    f"{variable} is not finite after step {step}, which is not saved: lower the "
                    "learning rate or clip the gradients, then resume from the last checkpoint."
                )
        # One thread writes at a time; its error belongs to the earlier checkpoint.
        self.wait()
        path = self.checkpoints.path(step)
        # Only this record shows the next process of a killed run how the time was used.
        fields = {"path": path, "seconds": self.reporter.seconds()}
        record = functools.partial(self.reporter.record, "checkpoint", step, **fields)
        with report_write_errors(path, self.checkpoints.directory):
            self.checkpoints.save(get_notes(), on_complete=record)
        self.saved_step = step
        self._timer.restart()

    def wait(self) -> None:
        """Waits until the checkpoint that a thread is writing is complete."""
        if self.checkpoints is not None:
            path = self.checkpoints.path(self.saved_step or 0)
            with report_write_errors(path, self.checkpoints.directory):
                self.checkpoints.wait()

    def all_restore(
        self, path: str | None = None, *, before: int | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """Restores the same checkpoint in every process.

        Args:
            path: the checkpoint; by default the newest.
            before: restore the newest checkpoint from before this step.

        Returns:
            Its path, or None if there is no checkpoint; and its notes.
        """
        if self.checkpoints is None:
            raise ValueError("Nothing to restore from: pass `checkpoints` to the constructor.")
        self.wait()
        if path:
            self.checkpoints.restore(path)
        else:
            path = self.checkpoints.all_restore_latest(
                before=before, print_line=self.reporter.print_line
            )
        # The restored checkpoint is not saved again.
        self.saved_step = self._step if path else None
        return path, read_notes(path or "")

    @property
    def _step(self) -> int:
        return int(self.trainer.global_step.numpy())
