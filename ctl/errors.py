"""What ends a run: a person's mistake, or a failure, each told in one line."""

from collections.abc import Iterable, Mapping, Sequence
import difflib
import os
import sys
from typing import Any

_SHOWN = 8  # names in a line, before the others are only counted


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


def print_line(line: str) -> None:
    """Prints a line. A reader that has gone, as `| tee` after Ctrl-C, does not end the run."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open, for all lines to come


def did_you_mean(name: str, *known: Mapping[str, str] | Iterable[str]) -> str:
    """Words such as ": did you mean X?" for the closest known name, else ": there are X, Y".

    Args:
        name: what was written.
        *known: names, or name -> how to show it. The same name in any collection comes before a
            close one in the first, which comes before a close one in the second.

    Returns:
        Words to stand behind "There is no X": nothing where nothing is known.
    """
    tables = [dict(n) if isinstance(n, Mapping) else {k: k for k in n} for n in known]
    folded = [{key.lower(): shown for key, shown in table.items()} for table in tables]
    for table in folded:
        if name.lower() in table:
            return f": did you mean {table[name.lower()]}?"
    for table in folded:
        close = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.6)
        if close:
            return f": did you mean {table[close[0]]}?"
    shown = list(tables[0].values()) if tables else []
    if not shown:
        return ""
    return f": there {'is' if len(shown) == 1 else 'are'} {', '.join(shown)}."


def type_name(value: Any) -> str:
    """What a value is, such as "a dict", "an int" or "None"."""
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0].lower() in 'aeiou')} {name}"


def list_some(names: Sequence[str]) -> str:
    """Names for a line: the first, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
