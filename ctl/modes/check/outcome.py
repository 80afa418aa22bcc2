"""Holds the outcome of one check, and formats the table of outcomes."""

from collections.abc import Sequence
import dataclasses

from ctl.errors import count

PASS, WARNING, FAIL = "pass", "warning", "FAIL"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one check.

    Attributes:
        verdict: PASS, WARNING or FAIL.
        observation: what the check measured, in one line.
        fix: what the user can do about it; "" if nothing needs to be done.
    """

    verdict: str
    observation: str
    fix: str = ""


def format_row(name: str, outcome: Outcome) -> str:
    """Formats one row of the table, with the fix on a second line if there is one."""
    lines = [f"{outcome.verdict:<8} {name:<22} {outcome.observation}".rstrip()]
    if outcome.fix:
        lines.append(f"{'':<8} {'':<22} -> {outcome.fix}")
    return "\n".join(lines)


def format_summary(outcomes: Sequence[Outcome]) -> str:
    """Formats the last line of the table: the number of checks with each verdict."""
    counts = {v: sum(o.verdict == v for o in outcomes) for v in (PASS, WARNING, FAIL)}
    checks, warnings = count(len(outcomes), "check"), count(counts[WARNING], "warning")
    return f"{checks}: {counts[PASS]} passed, {warnings}, {counts[FAIL]} failed."
