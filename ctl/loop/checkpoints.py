"""Checkpoints of a trainer, numbered by global step."""

import pathlib
import re
import tempfile

import tensorflow as tf

from ctl.errors import UsageError
from ctl.trainer import StandardTrainer


class Checkpoints:
    """Saves and restores everything that a trainer's next step depends on.

    checkpoints = Checkpoints("runs/mine/checkpoints", trainer)
    checkpoints.restore_latest()
    trainer.train(tf.constant(100))
    checkpoints.save()                              # runs/mine/checkpoints/ckpt-100
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        trainer: StandardTrainer,
        *,
        keep: int = 3,
        is_chief: bool = True,
    ):
        """Names the folder; nothing is written or read yet.

        Args:
            directory: the folder.
            trainer: whose `checkpoint_items` are saved.
            keep: how many checkpoints are kept, the newest.
            is_chief: whether this process' checkpoints are the run's. TensorFlow wants every process
                to save; the others' go to a temporary folder and away again.
        """
        self._trainer = trainer
        self._checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
        self._directory = pathlib.Path(directory)
        self._keep = keep
        self._is_chief = is_chief
        self._opened: tf.train.CheckpointManager | None = None

    @property
    def manager(self) -> tf.train.CheckpointManager:
        """TensorFlow's manager of the folder, which it creates."""
        if self._opened is None:
            self._opened = tf.train.CheckpointManager(
                self._checkpoint, str(self._directory), max_to_keep=self._keep
            )
        return self._opened

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint."""
        latest = tf.train.latest_checkpoint(str(self._directory))
        return step_of(latest) if latest else None

    def save(self) -> str:
        """Saves a checkpoint at the present step; returns its path."""
        step = int(self._trainer.global_step.numpy())
        if self._is_chief:
            path: str = self.manager.save(checkpoint_number=step, check_interval=False)
            return path
        with tempfile.TemporaryDirectory(prefix="ctl-checkpoint-") as folder:
            self._checkpoint.write(f"{folder}/ckpt")
        return self.path(step)

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return str(self._directory / f"ckpt-{step}")

    def restore_latest(self) -> str | None:
        """Restores the newest checkpoint; returns its path, or None where there is none."""
        path: str | None = tf.train.latest_checkpoint(str(self._directory))
        if path:
            self.restore(path)
        return path

    def restore(self, path: str) -> None:
        """Restores a checkpoint.

        Raises:
            UsageError: it is not of this trainer.
        """
        with self._trainer.strategy.scope():
            try:
                status = self._checkpoint.restore(path)
                status.assert_existing_objects_matched()
            except (AssertionError, ValueError, tf.errors.OpError) as error:
                reason = str(error).splitlines()[0]
                raise UsageError(
                    f"{path} does not fit this trainer ({reason}): use --fresh or another --workdir, "
                    "or the trainer that wrote it."
                ) from None


def step_of(path: str) -> int:
    """The global step in a checkpoint's name."""
    found = re.search(r"-(\d+)$", path)
    if not found:
        raise UsageError(f"{path} is not a checkpoint of ctl: its name has no step.")
    return int(found.group(1))
