"""Checks of a training loop that has ended."""

from collections.abc import Mapping
import math
from typing import Any

from ctl.errors import Failure, UsageError
from ctl.hardware import strategies
from ctl.loop.reporter import Reporter
from ctl.trainer import StandardTrainer


def count_repeated_steps(trainer: StandardTrainer, step: int, boundary: int) -> int:
    """Checks that a loop ended where it should.

    Args:
        trainer: the trainer.
        step: the global step.
        boundary: the step at which the loop should end.

    Returns:
        The number of extra steps that it ran: a coordinator repeats steps of lost workers.

    Raises:
        UsageError: the trainer does not count its steps.
    """
    repeats = strategies.spec_of(trainer.strategy).coordinated
    if step == boundary or (step > boundary and repeats):
        return step - boundary
    raise UsageError(
        f"A loop to step {boundary} ended at step {step}: train_step must add 1 to self.global_step."
    )


def check_loss(
    trainer: StandardTrainer, step: int, outputs: Mapping[str, Any], reporter: Reporter
) -> None:
    """Raises Failure if the loss is not finite although the trainer reported no such step."""
    # A user's own `replica_step`, or a parameter server, may apply updates that are not checked.
    loss = outputs.get("loss")
    policy = trainer.options.on_non_finite
    if policy != "ignore" and isinstance(loss, float) and not math.isfinite(loss):
        reporter.record("non_finite", step, policy="stop", tensor="the loss")
        raise Failure(
            f"The loss of the loop that ended at step {step} is {loss}. Nothing was saved since: lower "
            "the learning rate, clip the gradients, or continue with such losses by "
            "train.on_non_finite=ignore."
        )
