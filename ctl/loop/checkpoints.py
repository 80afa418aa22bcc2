"""Checkpoints of a trainer, numbered by global step."""

from collections.abc import Callable
import errno
import os
import pathlib
import tempfile

import tensorflow as tf

from ctl.errors import UsageError
from ctl.loop.agreement import Agreement
from ctl.loop.commits import Commits
from ctl.trainer import StandardTrainer


class Damaged(Exception):
    """A checkpoint's files are there and cannot be read; the one before may be."""


class Checkpoints:
    """Saves and restores everything that a trainer's next step depends on.

    checkpoints = Checkpoints("runs/mine/checkpoints", trainer)
    checkpoints.restore_latest()
    trainer.train(tf.constant(100))
    checkpoints.save()                              # runs/mine/checkpoints/ckpt-100
    checkpoints.wait()
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        trainer: StandardTrainer,
        *,
        keep: int = 3,
        keep_every: int = 0,
        background: bool = False,
        is_chief: bool = True,
        agreement: Agreement | None = None,
        on_restored: Callable[[], None] | None = None,
    ):
        """Names the folder; nothing is written or read yet.

        Args:
            directory: the folder.
            trainer: whose `checkpoint_items` are saved.
            keep: how many checkpoints are kept, the newest.
            keep_every: those at multiples of so many steps are kept too; 0 for none.
            background: copy the values and go on, while a thread writes them; for a run in one
                process.
            is_chief: whether this process' checkpoints are the run's. TensorFlow wants every process
                to save; the others' go to a temporary folder and away again.
            agreement: by which the processes restore the same one; not needed for one process.
            on_restored: called when a checkpoint was restored.
        """
        self.commits = Commits(directory)
        self._trainer = trainer
        self._checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
        self._directory = pathlib.Path(directory)
        self._keep = keep
        self._keep_every = keep_every
        self._background = background
        self._is_chief = is_chief
        self._agreement = agreement or Agreement()
        self._on_restored = on_restored or (lambda: None)
        self._writing: int | None = None  # the step that is being written

    def latest_step(self, before: int | None = None) -> int | None:
        """The step of the newest whole checkpoint, or of the newest before a step."""
        steps = [step for step in self.commits.steps() if before is None or step < before]
        return steps[-1] if steps else None

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return self.commits.path(step)

    def save(self) -> str:
        """Saves a checkpoint at the present step; returns its path.

        Where it is written in the background, it is whole some time after, or after `wait`.
        """
        step = int(self._trainer.global_step.numpy())
        if not self._is_chief:
            with tempfile.TemporaryDirectory(prefix="ctl-checkpoint-") as folder:
                self._checkpoint.write(f"{folder}/ckpt")
            return self.path(step)
        self.wait()
        os.makedirs(self._directory, exist_ok=True)
        self.commits.remove(step)
        options = tf.train.CheckpointOptions(
            experimental_enable_async_checkpoint=self._background,
            experimental_write_callbacks=[lambda _: self._commit(step)],
        )
        self._writing = step if self._background else None
        self._checkpoint.write(self.path(step), options)
        return self.path(step)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is whole.

        Raises:
            OSError or tf.errors.OpError: it could not be written.
        """
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        self._checkpoint.sync()
        if self.commits.fault(step):
            raise self._thread_error() or OSError(errno.EIO, "it was not written to the end")

    def _thread_error(self) -> BaseException | None:
        """What went wrong in the thread that writes, which TensorFlow tells nobody but the log."""
        helper = getattr(self._checkpoint, "_async_checkpointer_impl", None)
        error: BaseException | None = getattr(helper, "_async_error", None)
        if error:
            helper._async_error = None  # type: ignore[union-attr]
        return error

    def restore_latest(
        self, *, before: int | None = None, say: Callable[[str], None] | None = None
    ) -> str | None:
        """Restores the newest checkpoint that every process can read.

        Args:
            before: only one of an earlier step than this.
            say: is told of those that are passed over.

        Returns:
            Its path, or None where there is none.

        Raises:
            UsageError: there are some, and none can be read.
        """
        say = say or (lambda line: None)
        self.wait()  # the newest may be on its way
        step = self._latest(before)
        for newer, fault in self.commits.faults().items():
            if newer > step and (before is None or newer < before):
                say(f"Passed over {self.path(newer)}: {fault}.")
        while step >= 0:
            fault = ""
            try:
                self.restore(self.path(step))
            except Damaged as error:
                fault = str(error)
            if not self._agreement.any(bool(fault)):
                return self.path(step)
            say(f"Passed over {self.path(step)}: {fault}.")
            step = self._latest(before=step)
        self._refuse_if_all_damaged()
        return None

    def _latest(self, before: int | None) -> int:
        """The chief's newest, -1 for none."""
        step = self.latest_step(before)
        return self._agreement.of_chief(-1 if step is None else step)

    def _refuse_if_all_damaged(self) -> None:
        """Refuses to start anew where there were checkpoints and none is of use."""
        if self.commits.steps() or self.commits.damaged():
            raise UsageError(
                f"{self._directory} has checkpoints, and none of them can be read: mend the files, or "
                "start anew by --fresh."
            )

    def restore(self, path: str) -> None:
        """Restores a checkpoint.

        Raises:
            UsageError: it is not of this trainer.
            Damaged: it cannot be read.
        """
        self.wait()
        with self._trainer.strategy.scope():
            try:
                status = self._checkpoint.read(path)
                status.assert_existing_objects_matched()
            except (AssertionError, ValueError, tf.errors.OpError) as error:
                reason = str(error).splitlines()[0]
                if _unreadable(error):
                    raise Damaged(reason) from None
                raise UsageError(
                    f"{path} does not fit this trainer ({reason}): use --fresh or another --workdir, "
                    "or the trainer that wrote it."
                ) from None
        self._on_restored()

    def _commit(self, step: int) -> None:
        self.commits.commit(step)
        self.commits.prune(keep=self._keep, keep_every=self._keep_every)
        whole = [self.path(found) for found in self.commits.steps()]
        # For TensorFlow's own tools, such as `tf.train.latest_checkpoint`.
        tf.compat.v1.train.update_checkpoint_state(
            str(self._directory), whole[-1], all_model_checkpoint_paths=whole
        )


def _unreadable(error: Exception) -> bool:
    """Whether the files are at fault, and not what they are read into."""
    # TensorFlow raises a bare OpError where an index is not one.
    files = (tf.errors.DataLossError, tf.errors.OutOfRangeError)
    missing = isinstance(error, tf.errors.NotFoundError) and "matching files" in str(error)
    return isinstance(error, files) or type(error) is tf.errors.OpError or missing
