"""Decides which batches a run skips after rollbacks."""

from collections.abc import Callable, Sequence
from typing import Any

from ctl.errors import Failure, NonFiniteStep

LIMIT = 10  # rollbacks of one run

Decision = dict[str, Any]  # {"step": 33, "tensor": "the loss"}, as in rollbacks.json


class RollbackPolicy:
    """Decides which batches a run skips after it was rolled back to its last checkpoint.

        rollback = RollbackPolicy(record=workdir.write_rollbacks)
        rollback.skip(error)                # a NonFiniteStep; then restore the last checkpoint
        rollback.steps                      # ... train up to each of these steps, and skip its batch

    A decision is permanent. The batch of a step is a function of the seed and the step alone, so a run
    that is killed and resumed skips the same batches.

    Args:
        record: called with all decisions whenever one is added, to save them.
        earlier: the decisions that `record` saved.
    """

    def __init__(
        self,
        *,
        record: Callable[[Sequence[Decision]], None] | None = None,
        earlier: Sequence[Decision] = (),
    ):
        self._record = record or (lambda decisions: None)
        self._decisions = list(earlier)

    @property
    def steps(self) -> list[int]:
        """The steps whose batches are skipped, one for each rollback of the run."""
        return [decision["step"] for decision in self._decisions]

    def skip(self, error: NonFiniteStep) -> None:
        """Decides to skip the batch of a step from now on.

        Raises:
            Failure: the limit is reached.
        """
        count = len(self._decisions)
        if count >= LIMIT:
            raise Failure(
                f"{error.what} The run was rolled back {count} times, which is its limit: "
                "check the data, lower the learning rate, or clip the gradients."
            )
        self._decisions.append({"step": error.step, "tensor": error.tensor})
        # Recorded before the checkpoint is restored: a run killed in between skips the batch too.
        self._record(self._decisions)
