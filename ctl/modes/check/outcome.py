"""What a look came to, and the table of all of them. Loads no TensorFlow."""

from collections.abc import Sequence
import dataclasses

PASS, WARNING, FAIL = "pass", "warning", "FAIL"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a look came to.

    Attributes:
        verdict: PASS, WARNING or FAIL.
        found: what was seen, in a line.
        fix: what to do about it; "" where there is nothing to do.
    """

    verdict: str
    found: str
    fix: str = ""


def row(name: str, outcome: Outcome) -> str:
    """A row of the table, and below it what to do."""
    lines = [f"{outcome.verdict:<8} {name:<22} {outcome.found}".rstrip()]
    if outcome.fix:
        lines.append(f"{'':<8} {'':<22} -> {outcome.fix}")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line."""
    counts = {v: sum(o.verdict == v for o in outcomes) for v in (PASS, WARNING, FAIL)}
    warnings = f"{counts[WARNING]} warning{'s' * (counts[WARNING] != 1)}"
    return f"{len(outcomes)} looks: {counts[PASS]} passed, {warnings}, {counts[FAIL]} failed."
