"""What a user can change if a training step does not fit into memory."""

import dataclasses
import re

from ctl.configs import compatibility
from ctl.replica.plan import Plan

# "Too many open files" raises the same exception.
_MEMORY = re.compile(r"\bOOM\b|memory|allocat", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a ResourceExhaustedError is about memory."""
    return bool(_MEMORY.search(str(error)))


def advice(plan: Plan) -> str:
    """Returns one line: what did not fit, and what takes about half of the memory.

    Args:
        plan: the trainer's resolved options.
    """
    rows, count = plan.layout.rows_per_replica, plan.options.gradient_accumulation_steps
    parts = f" in {count} micro-batches" if count > 1 else ""
    problem = f"The step ran out of memory with {rows} rows per replica{parts}"
    # Activations, the largest part, are proportional to the rows of a micro-batch.
    doubled = min(2 * count, rows)
    choice = dataclasses.replace(plan.choice, micro_batches=doubled)
    # The advice must not lead to the next rejection.
    allowed = not any(rule.broken(choice) for rule in compatibility.RULES)
    if doubled > count and allowed and not plan.own_train_step:
        twice = " (twice the present number)" if doubled == 2 * count else ""
        return (
            f"{problem}: set optimizer.gradient_accumulation_steps={doubled}{twice}, wrap layers in "
            "ctl.recompute, or reduce the batch size."
        )
    # It has no effect in a train_step of the user's own.
    recompute = "" if plan.own_train_step else "wrap layers in ctl.recompute, or "
    return f"{problem}: {recompute}{'reduce the batch size' if rows > count else 'use a smaller model'}."
