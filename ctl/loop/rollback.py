"""What a run does about steps that are not finite, and the record of it. Loads no TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

from ctl.errors import Failure, NonFiniteStep

LIMIT = 10

Decision = dict[str, Any]  # {"step": 33, "tensor": "the loss"}: JSON


class RollbackPolicy:
    """Decides which batches a run leaves out after a rollback.

        guard = Guard(limit=10, record=workdir.write_rollbacks)
        guard.leave_out(error)          # a NonFiniteStep; the run goes back to its last checkpoint
        guard.until(step, boundary)     # ... and trains up to that batch
        guard.leaves_out(step)          # ... without it

    A decision is of a step, which is a batch, for good: a run that is killed and started again leaves
    out the same ones.
    """

    def __init__(
        self,
        *,
        limit: int = LIMIT,
        record: Callable[[Sequence[Decision]], None] | None = None,
        earlier: Sequence[Decision] = (),
    ):
        """Takes up what was decided before.

        Args:
            limit: how many rollbacks a run may have.
            record: keeps the decisions, where they survive this process.
            earlier: what it kept.
        """
        self._limit = limit
        self._record = record or (lambda decisions: None)
        self._decisions = list(earlier)

    @property
    def rollbacks(self) -> int:
        """How many there were."""
        return len(self._decisions)

    def leaves_out(self, step: int) -> bool:
        """Whether the batch of a step is left out."""
        return any(decision["step"] == step for decision in self._decisions)

    def until(self, step: int, boundary: int) -> int:
        """The boundary of a loop from `step` on, or the batch before it that is left out."""
        ahead = [d["step"] for d in self._decisions if step < d["step"] < boundary]
        return min(ahead, default=boundary)

    def leave_out(self, error: NonFiniteStep) -> None:
        """Decides to go on without the batch of a step.

        Raises:
            Failure: the limit is reached.
        """
        if self.rollbacks >= self._limit:
            raise Failure(
                f"{error.what} The run was rolled back {self.rollbacks} times already, which is its "
                "limit: look at the data, take a smaller learning rate or clip the gradients, or "
                "raise train.rollback_limit."
            )
        self._decisions.append({"step": error.step, "tensor": error.tensor})
        self._record(self._decisions)
