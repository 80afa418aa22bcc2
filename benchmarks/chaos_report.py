"""The kills of benchmarks.chaos, and the table that summarizes them."""

import argparse
import collections
import dataclasses
import statistics


@dataclasses.dataclass
class Kill:
    """One kill that counted.

    Attributes:
        phase: what the process was doing: start, step, save or eval.
        after: seconds since the process was started.
        checkpoint: the step of the latest complete checkpoint afterwards.
        time: when the process was killed, by the monotonic clock.
        code: the exit code.
        ending: seconds from the signal to the end of the process.
        recovery: seconds until the next process reported a new step; None if it was killed before.
    """

    phase: str
    after: float
    checkpoint: int
    time: float
    code: int
    ending: float
    recovery: float | None = None


def table(
    kills: list[Kill], difference: float, examples: str, lines_count: int, flags: argparse.Namespace
) -> str:
    """Formats the result as a markdown table.

    Args:
        kills: the kills that counted.
        difference: the largest difference of any variable from the undisturbed run.
        examples: how many examples the run used.
        lines_count: the number of lines of metrics.jsonl, the same in both runs.
        flags: the command line of benchmarks.chaos.
    """
    setup = f"{flags.workers} workers" if flags.workers > 1 else flags.strategy
    phases = collections.Counter(kill.phase for kill in kills)
    phase_counts = ", ".join(f"{phases[name]} {name}" for name in ("start", "step", "save", "eval"))
    recoveries = [kill.recovery for kill in kills if kill.recovery is not None]
    lines = [
        f"| {flags.signal} on {setup}, seed {flags.seed}, {flags.steps} steps | |",
        "|---|---:|",
        f"| kills | {len(kills)} |",
        f"| phases | {phase_counts} |",
        f"| seconds to the first new step, of {len(recoveries)} | {median_and_max(recoveries)} |",
        "| unreadable checkpoints | 0 |",
        f"| epochs x examples, each consumed once | {examples} |",
        f"| lines of metrics.jsonl, the same in both runs | {lines_count} |",
        f"| largest difference of all weights, slots and counters | {difference:g} |",
    ]
    if flags.signal == "SIGTERM":
        seconds = [kill.ending for kill in kills if kill.code == 75]
        lines.append(f"| seconds to exit code 75, of {len(seconds)} | {median_and_max(seconds)} |")
    return "\n".join(lines)


def median_and_max(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}"
