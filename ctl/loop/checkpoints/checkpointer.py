"""Checkpoints of a trainer, numbered by global step."""

from collections.abc import Callable
import errno
import os
import pathlib
import tempfile

import tensorflow as tf

from ctl.errors import UsageError, list_some
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.trainer import StandardTrainer


class DamagedCheckpoint(Exception):
    """A checkpoint's files are there and cannot be read; the one before may be."""


class Checkpointer:
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
        processes: ProcessGroup | None = None,
        on_restored: Callable[[], None] | None = None,
        partial: bool = False,
        reads_only: bool = False,
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
            processes: by which the processes restore the same one; not needed for one process.
            on_restored: called when a checkpoint was restored.
            partial: restore what matches by name and shape where a checkpoint does not fit.
            reads_only: nothing is saved after, so that what a checkpoint has beside the trainer's
                state is not lost by leaving it.
        """
        self.files = CheckpointFiles(directory)
        self._trainer = trainer
        self._checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
        self._directory = pathlib.Path(directory)
        self._keep = keep
        self._keep_every = keep_every
        self._background = background
        self._is_chief = is_chief
        self._processes = processes or ProcessGroup()
        self._on_restored = on_restored or (lambda: None)
        self._partial = partial
        self._reads_only = reads_only
        self._writing: int | None = None  # the step that is being written
        # What is restored when the trainer builds it, and the checkpoint that it is in.
        self._waiting: list[matching.Variable] = []
        self._restored: matching.CheckpointContent | None = None
        # What the last restore could not match, of one that was partial.
        self.unmatched: matching.Comparison | None = None

    def latest_step(self, before: int | None = None) -> int | None:
        """The step of the newest whole checkpoint, or of the newest before a step."""
        steps = [step for step in self.files.steps() if before is None or step < before]
        return steps[-1] if steps else None

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return self.files.path(step)

    def save(self) -> str:
        """Saves a checkpoint at the present step; returns its path.

        Where it is written in the background, it is whole some time after, or after `wait`.
        """
        self._refuse_if_lost()
        step = int(self._trainer.global_step.numpy())
        if not self._is_chief:
            with tempfile.TemporaryDirectory(prefix="ctl-checkpoint-") as folder:
                self._checkpoint.write(f"{folder}/ckpt")
            return self.path(step)
        self.wait()
        os.makedirs(self._directory, exist_ok=True)
        self.files.remove(step)
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
        if self.files.fault(step):
            raise self._thread_error() or OSError(errno.EIO, "it was not written to the end")

    def _thread_error(self) -> BaseException | None:
        """What went wrong in the thread that writes, which TensorFlow tells nobody but the log."""
        helper = getattr(self._checkpoint, "_async_checkpointer_impl", None)
        error: BaseException | None = getattr(helper, "_async_error", None)
        if error:
            helper._async_error = None  # type: ignore[union-attr]
        return error

    def restore_latest(
        self, *, before: int | None = None, print_line: Callable[[str], None] | None = None
    ) -> str | None:
        """Restores the newest checkpoint that every process can read.

        Args:
            before: only one of an earlier step than this.
            print_line: is told of those that are passed over.

        Returns:
            Its path, or None where there is none.

        Raises:
            UsageError: there are some, and none can be read.
        """
        print_line = print_line or (lambda line: None)
        self.wait()  # the newest may be on its way
        step = self._latest(before)
        for newer, fault in self.files.faults().items():
            if newer > step and (before is None or newer < before):
                print_line(f"Passed over {self.path(newer)}: {fault}.")
        while step >= 0:
            fault = ""
            try:
                self.restore(self.path(step))
            except DamagedCheckpoint as error:
                fault = str(error)
            if not self._processes.any_process(bool(fault)):
                return self.path(step)
            print_line(f"Passed over {self.path(step)}: {fault}.")
            step = self._latest(before=step)
        self._refuse_if_all_damaged()
        return None

    def _latest(self, before: int | None) -> int:
        """The chief's newest, -1 for none."""
        step = self.latest_step(before)
        return self._processes.broadcast_from_chief(-1 if step is None else step)

    def _refuse_if_all_damaged(self) -> None:
        """Refuses to start anew where there were checkpoints and none is of use."""
        if self.files.steps() or self.files.damaged():
            raise UsageError(
                f"{self._directory} has checkpoints, and none of them can be read: mend the files, or "
                "start anew by --fresh."
            )

    def restore(self, path: str) -> None:
        """Restores a checkpoint, the whole of it unless a part is allowed.

        Raises:
            UsageError: it is not of this trainer.
            Damaged: it cannot be read.
        """
        self.wait()
        self.unmatched, self._waiting = None, []
        with self._trainer.strategy.scope():
            try:
                content = matching.CheckpointContent(path)
                if not self._restore_by_place(path, content):
                    self._restore_by_name(path, content)
            except UsageError:
                raise
            except (AssertionError, ValueError, tf.errors.OpError) as error:
                reason = str(error).splitlines()[0]
                if _unreadable(error):
                    raise DamagedCheckpoint(reason) from None
                raise UsageError(_misfit(path, reason)) from None
        self._on_restored()

    def _restore_by_place(self, path: str, content: matching.CheckpointContent) -> bool:
        """As TensorFlow does; not where that would leave out a part of either side."""
        places = content.places(self._checkpoint)
        at_odds, beside = matching.misplaced(
            matching.variables_of(self._checkpoint), content, places
        )
        waiting = [v for v in beside if content.waits(v, places)]
        if at_odds or (len(waiting) < len(beside) and not self._reads_only):
            return False
        self._checkpoint.read(path).assert_existing_objects_matched()
        self._restored, self._waiting = content, waiting
        return True

    def _restore_by_name(self, path: str, content: matching.CheckpointContent) -> None:
        mine = matching.variables_of(self._checkpoint)
        found = matching.compare(mine, content.variables, content.places(self._checkpoint))
        told = found.told()
        if not self._partial and not found.complete:
            raise UsageError(_misfit(path, told))
        restored = {id(variable.source) for variable, _ in found.pairs}
        trainer = self._trainer
        model = {id(variable.source) for variable in matching.variables_of(trainer.model)}
        if not {id(trainer.global_step), id(trainer.optimizer.iterations)} <= restored:
            raise UsageError(
                f"{path} does not fit this trainer even in part, since the counters of steps and "
                f"updates do not match ({told}): use --fresh or another --workdir."
            )
        if not model & restored:
            raise UsageError(
                f"{path} does not fit this trainer even in part, since no variable of the model "
                f"matches ({told}): use --fresh or another --workdir."
            )
        # All are read before one is changed.
        values = [(variable.source, content.value(other)) for variable, other in found.pairs]
        for variable, value in values:
            variable.assign(value)
        self.unmatched = None if found.complete else found

    def _refuse_if_lost(self) -> None:
        """Saves nothing without what was in the restored checkpoint for parts not yet built then."""
        if not self._waiting or not self._restored:
            return
        built = self._restored.places(self._checkpoint)
        lost = [variable.name for variable in self._waiting if variable.node not in built]
        if lost:
            raise UsageError(
                f"The checkpoint that was restored has {list_some(lost)}, and the trainer built "
                "nothing to restore it into, so that saving would lose it: build in the constructor "
                "what these belong to, or use --fresh or another --workdir."
            )
        self._waiting = []

    def _commit(self, step: int) -> None:
        self.files.commit(step)
        self.files.prune(keep=self._keep, keep_every=self._keep_every)
        whole = [self.path(found) for found in self.files.steps()]
        # For TensorFlow's own tools, such as `tf.train.latest_checkpoint`.
        tf.compat.v1.train.update_checkpoint_state(
            str(self._directory), whole[-1], all_model_checkpoint_paths=whole
        )


def _misfit(path: str, reason: str) -> str:
    return (
        f"{path} does not fit this trainer ({reason}): go on with what matches by "
        "--allow_partial_restore, start anew by --fresh or another --workdir, or use the trainer "
        "that wrote it."
    )


def _unreadable(error: Exception) -> bool:
    """Whether the files are at fault, and not what they are read into."""
    # TensorFlow raises a bare OpError where an index is not one.
    files = (tf.errors.DataLossError, tf.errors.OutOfRangeError)
    missing = isinstance(error, tf.errors.NotFoundError) and "matching files" in str(error)
    return isinstance(error, files) or type(error) is tf.errors.OpError or missing
