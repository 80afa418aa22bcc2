"""When a run saves, and what is told of it."""

from collections.abc import Callable
import contextlib
import pathlib
import time
from typing import Any

from ctl.errors import Failure
from ctl.loop import write_errors
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.trainer import StandardTrainer


class CheckpointManager:
    """Saves a trainer when it is time, each step once, and nothing that is not finite.

        saving = Saving(trainer, Checkpoints("ckpts", trainer), interval=500)
        saving.restore()
        while training:
            ...
            if saving.is_due():
                saving.save()
        saving.wait()

    Attributes:
        checkpoints: where to; None to save nothing.
        saved_step: the step of the newest checkpoint that this process wrote or restored, or None.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        checkpoints: Checkpointer | None,
        *,
        interval: int = 0,
        due: Callable[[float], bool] | None = None,
        on_event: Callable[..., None] | None = None,
        print_line: Callable[[str], None] | None = None,
    ):
        """Takes what to save, where to, and when.

        Args:
            trainer: what is saved.
            checkpoints: where to.
            interval: steps between two saves; 0 for the end only.
            due: asked, with the seconds since the last save, whether to save as well.
            on_event: called as on_event(name, step, **fields) for what is worth a record.
            print_line: is told of checkpoints that are passed over.
        """
        self.checkpoints = checkpoints
        self.interval = interval
        self.saved_step: int | None = None
        self._trainer = trainer
        self._due = due or (lambda seconds: False)
        self._on_event = on_event or (lambda *_, **__: None)
        self._print_line = print_line
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether to save at the present step."""
        at_interval = self.interval and self._step % self.interval == 0
        return at_interval or self._due(time.monotonic() - self._saved_at)

    def save(self) -> None:
        """Saves a checkpoint, unless this step's is there already.

        Raises:
            Failure: it cannot be written, or a weight is not finite.
        """
        step = self._step
        if self.checkpoints is None or self.saved_step == step:
            return
        broken = None
        if self._trainer.options.on_non_finite != "ignore":
            broken = self._trainer.not_finite()
        if broken:
            raise Failure(
                f"{broken} is not finite after step {step}, which is not saved: take a smaller "
                "learning rate or clip the gradients, and go on from the last checkpoint."
            )
        self.wait()
        with self.writing(self.checkpoints.path(step)):
            path = self.checkpoints.save()
        self.saved_step, self._saved_at = step, time.monotonic()
        self._on_event("checkpoint", step, path=path)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is whole."""
        if self.checkpoints is not None:
            with self.writing(self.checkpoints.path(self.saved_step or 0)):
                self.checkpoints.wait()

    def restore(self, path: str | None = None, *, before: int | None = None) -> str | None:
        """Restores a checkpoint.

        Args:
            path: which; the newest if none is named.
            before: the newest of an earlier step than this.

        Returns:
            Its path, or None where there is none.
        """
        if self.checkpoints is None:
            raise ValueError("There are no `checkpoints` to restore: give some to the constructor.")
        self.wait()
        if path:
            self.checkpoints.restore(path)
        else:
            path = self.checkpoints.restore_latest(before=before, print_line=self._print_line)
        self.saved_step = self._step if path else None
        return path

    def writing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Tells in one line that it could not be written, and which checkpoint is intact."""
        folder = pathlib.Path(self.checkpoints.path(0)).parent if self.checkpoints else None
        return write_errors.report_write_errors(what, folder)

    @property
    def _step(self) -> int:
        step: Any = self._trainer.global_step.numpy()
        return int(step)
