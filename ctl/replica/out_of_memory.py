"""What to do when a training step does not fit into memory. Loads no TensorFlow."""

import dataclasses
import re

from ctl.configs import compatibility

# Files and messages can be exhausted, too: "Too many open files" is the same exception.
_OF_MEMORY = re.compile(r"\bOOM\b|memory|allocat", re.IGNORECASE)


def is_told_by(error: BaseException) -> bool:
    """Whether a ResourceExhaustedError is about memory.

    Args:
        error: the exception.
    """
    return bool(_OF_MEMORY.search(str(error)))


def advice(rows: int, choice: compatibility.Choice, *, accumulates: bool = True) -> str:
    """One line that says what did not fit, and what would take half of it.

    Args:
        rows: of a replica's share of the global batch.
        choice: the trainer's options that bear on accumulation.
        accumulates: whether the step is one that micro-batches work in.
    """
    count = choice.micro_batches
    parts = f" in {count} micro-batches" if count > 1 else ""
    told = f"The step ran out of memory with {rows} rows a replica{parts}"
    more = dataclasses.replace(choice, micro_batches=min(2 * count, rows))
    if (
        accumulates
        and more.micro_batches > count
        and not any(r.broken(more) for r in compatibility.RULES)
    ):
        twice = " (twice the present one)" if more.micro_batches == 2 * count else ""
        return (
            f"{told}: set optimizer.gradient_accumulation_steps={more.micro_batches}{twice}, or a "
            "smaller batch."
        )
    if rows > count:
        return f"{told}: set a smaller batch."
    return f"{told}: take a smaller model."
