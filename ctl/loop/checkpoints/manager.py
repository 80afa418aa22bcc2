"""Decides when a run saves a checkpoint, and records it."""

from collections.abc import Callable, Mapping
import pathlib
import time
from typing import Any

from ctl.errors import Failure
from ctl.hardware.collectives import ProcessGroup
from ctl.loop import write_errors
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.timer import Timer
from ctl.replica.measure.non_finite import first_non_finite_variable
from ctl.trainer import StandardTrainer


class CheckpointManager:
    """Saves each step at most once, and no step whose weights are not finite.

        manager = CheckpointManager(trainer, Checkpointer("ckpts", trainer), interval=500)
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
        interval: steps between two checkpoints; 0 for the end only.
        seconds: seconds between two checkpoints, in addition to `interval`; 0 for no limit.
        on_event: called as on_event(name, step, **fields), to record a checkpoint.
        print_line: prints which checkpoints are skipped, and why.
        get_notes: returns what to record with a checkpoint besides the trainer, in JSON types.
        set_notes: called with what a restored checkpoint has recorded.
        clock: returns the time, in seconds.

    Attributes:
        saved_step: the step of the newest checkpoint that this process saved or restored, or None.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        checkpoints: Checkpointer | None,
        *,
        interval: int = 0,
        seconds: float = 0.0,
        on_event: Callable[..., None] | None = None,
        print_line: Callable[[str], None] | None = None,
        get_notes: Callable[[], Mapping[str, Any]] | None = None,
        set_notes: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.checkpoints = checkpoints
        self.interval = interval
        # The time to the first checkpoint counts from the start of the process.
        self._timer = Timer(seconds, clock=clock)
        self.saved_step: int | None = None
        self.trainer = trainer
        self._on_event = on_event or (lambda *_, **__: None)
        self._print_line = print_line
        self._get_notes = get_notes or (lambda: {})
        self._set_notes = set_notes or (lambda notes: None)

    def is_due_by_step(self) -> bool:
        """Returns whether the current step is a multiple of the interval."""
        return bool(self.interval) and self._step % self.interval == 0

    def all_due(self, processes: ProcessGroup) -> bool:
        """Returns whether to save now, by the interval or by the chief's clock; collective."""
        return self.is_due_by_step() or self._timer.all_due(processes)

    def save(self) -> None:
        """Saves a checkpoint, unless this step has one already.

        Raises:
            Failure: it cannot be written, or a weight is not finite.
        """
        step = self._step
        if self.checkpoints is None or self.saved_step == step:
            return
        # A step may make weights infinite with finite gradients. Saving them would replace the
        # checkpoint to go back to.
        if self.trainer.options.on_non_finite != "ignore":
            variable = first_non_finite_variable(self.trainer.model.trainable_variables)
            if variable:
                raise Failure(
                    f"{variable} is not finite after step {step}, which is not saved: lower the "
                    "learning rate or clip the gradients, then resume from the last checkpoint."
                )
        # One thread writes at a time; its error belongs to the earlier checkpoint.
        self.wait()
        path = self.checkpoints.path(step)
        with write_errors.report_write_errors(path, self.checkpoints.directory):
            self.checkpoints.save(self._get_notes())
        self.saved_step = step
        self._timer.restart()
        self._on_event("checkpoint", step, path=path)

    def wait(self) -> None:
        """Waits until the checkpoint that a thread is writing is complete."""
        if self.checkpoints is not None:
            path = self.checkpoints.path(self.saved_step or 0)
            with write_errors.report_write_errors(path, self.checkpoints.directory):
                self.checkpoints.wait()

    def all_restore(self, path: str | None = None, *, before: int | None = None) -> str | None:
        """Restores the same checkpoint in every process.

        Args:
            path: the checkpoint; by default the newest.
            before: restore the newest checkpoint from before this step.

        Returns:
            Its path, or None if there is no checkpoint.
        """
        if self.checkpoints is None:
            raise ValueError("Nothing to restore from: pass `checkpoints` to the constructor.")
        self.wait()
        if path:
            self.checkpoints.restore(path)
        else:
            path = self.checkpoints.all_restore_latest(before=before, print_line=self._print_line)
        # The restored checkpoint is not saved again.
        self.saved_step = self._step if path else None
        if path:
            files, name = CheckpointFiles(pathlib.Path(path).parent), pathlib.Path(path).name
            step = name.removeprefix("ckpt-")
            self._set_notes(files.notes(int(step)) if step.isdecimal() else {})
        return path

    @property
    def _step(self) -> int:
        return int(self.trainer.global_step.numpy())
