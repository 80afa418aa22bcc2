"""What ends a run: a person's mistake, or a failure, each told in one line."""

from collections.abc import Sequence
from typing import Any


class UsageError(ValueError):
    """A mistake that the person who runs or configures ctl can mend.

    Its message is one line that says what is wrong, where, and what to do. The program prints that
    line and exits with 2; in a plain script it is a `ValueError` like any other.
    """

    # AutoGraph wraps what is raised while it traces into errors of its own, unless they say so.
    ag_pass_through = True


class Failure(RuntimeError):
    """Something outside of the run went wrong, such as a process that never came.

    Its message is one line as a `UsageError`'s; the program prints it and exits with 1.
    """

    ag_pass_through = True


class NonFiniteStep(Failure):
    """A step's loss or gradients were not finite, or its loss a spike: the training is to stop there.

    Attributes:
        step: the global step.
        tensor: what was not finite first.
        what: one sentence that says it.
    """

    def __init__(self, report: Any, examples: Sequence[int] | None):
        """Says what was not finite.

        Args:
            report: a `replica.non_finite.Report`.
            examples: the examples of the step's batch, where they have numbers.
        """
        self.step: int = report.step
        self.tensor: str = report.tensor
        shown = ", ".join(map(str, (examples or [])[:8]))
        more = ", ..." if examples and len(examples) > 8 else ""
        batch = f", on the examples {shown}{more}" if examples else ""
        self.what = f"Step {report.step} {report}{batch}."
        super().__init__(
            f"{self.what} Nothing was saved since: look at these examples, take a smaller learning "
            "rate or clip the gradients, or leave such steps out by train.on_non_finite=skip or "
            "rollback."
        )


class LostWorker(RuntimeError):
    """Another process of the run has gone; the program exits with 75: run me again."""

    ag_pass_through = True
