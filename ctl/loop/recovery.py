"""Rolls a run back after a step that was not finite."""

from ctl.errors import Failure, NonFiniteStep
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.reporter import Reporter
from ctl.loop.rollback import RollbackPolicy


def all_roll_back(
    error: NonFiniteStep,
    rollback: RollbackPolicy,
    manager: CheckpointManager,
    reporter: Reporter,
) -> None:
    """Restores the last checkpoint and skips the batch from now on, or ends the run.

    The trainer checks reduced values, so every process calls this for the same step.

    Args:
        error: the error of the step.
        rollback: decides which batches to skip.
        manager: restores the checkpoint.
        reporter: prints and records what happens.

    Raises:
        NonFiniteStep: the trainer's `on_non_finite` is not "rollback".
        Failure: no checkpoint is left, or the limit of rollbacks is reached.
    """
    policy = manager.trainer.options.on_non_finite
    reporter.record("non_finite", error.step, policy=policy, tensor=error.tensor)
    if policy != "rollback":
        raise error
    rollback.skip(error)
    # A checkpoint of the step itself was saved before its batch was read.
    path = manager.all_restore(before=error.step + 1)
    if path is None:
        raise Failure(
            f"{error.what} No checkpoint is left to go back to: start again with --fresh."
        )
    step = int(manager.trainer.global_step.numpy())
    reporter.metrics.restore(step)
    reporter.record("rollback", step, left_out=error.step, path=path)
    reporter.print_line(
        f"{error.what} Back to step {step}; that batch is skipped from now on "
        f"(rollback {rollback.rollbacks})."
    )
