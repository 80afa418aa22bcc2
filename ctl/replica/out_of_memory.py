"""What a user can change if a training step does not fit into memory."""

from collections.abc import Iterator
import dataclasses
import logging
import re
from typing import Any

import tensorflow as tf

from ctl.configs import compatibility
from ctl.hardware import devices
from ctl.replica import memory_estimate
from ctl.replica.memory_estimate import MemoryEstimate
from ctl.replica.plan import Plan

# "Too many open files" raises the same exception.
_MEMORY = re.compile(r"\bOOM\b|memory|allocat", re.IGNORECASE)
_USABLE = 0.9  # of the limit, because of fragmentation and the work space of kernels
_LOG = logging.getLogger("ctl")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The memory of a GPU on which a step did not fit, and what the step needs.

    Attributes:
        estimate: the step's memory, by part.
        limit: the bytes that TensorFlow may allocate.
        current: the bytes that are allocated between two steps, such as the variables.
    """

    estimate: MemoryEstimate
    limit: int
    current: int

    def needs(self, micro_batches: int) -> int:
        """Returns the bytes that a step needs with a number of micro-batches."""
        # The estimate of the variables alone would omit what else the program holds on the device.
        return max(self.current, self.estimate.persistent) + self.estimate.step_bytes(micro_batches)

    def fits(self, micro_batches: int) -> bool:
        """Whether a step with this number of micro-batches fits."""
        return self.needs(micro_batches) <= _USABLE * self.limit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a ResourceExhaustedError is about memory."""
    return bool(_MEMORY.search(str(error)))


def measure(trainer: Any) -> Measurement | None:
    """Measures the GPU of the first replica and estimates the step; None if one of them is not known.

    Args:
        trainer: a `StandardTrainer` whose step ran out of memory.
    """
    device = devices.replica_devices(trainer.strategy)[0]
    limit = devices.gpu_memory_limit(device)
    if limit is None:
        return None
    try:
        current = tf.config.experimental.get_memory_info(device)["current"]
        return Measurement(memory_estimate.estimate(trainer), limit, current)
    except Exception as error:  # the message about the memory must not be lost
        _LOG.debug("The memory of the step is not estimated: %s", error)
        return None


def advice(plan: Plan, measured: Measurement | None = None) -> str:
    """Returns one line: what did not fit, and what would fit.

    Args:
        plan: the trainer's resolved options.
        measured: the memory; without it the line proposes to halve the largest part.
    """
    rows, count = plan.layout.rows_per_replica, plan.options.gradient_accumulation_steps
    parts = f" in {count} micro-batches" if count > 1 else ""
    problem = f"The step ran out of memory with {rows} rows per replica{parts}"
    if measured and measured.fits(count):
        measured = None  # the estimate omits something
    if measured:
        needed, limit = _gib(measured.needs(count)), _gib(measured.limit)
        problem += f", which need about {needed} of {limit} on the device"
    # It has no effect in a train_step of the user's own.
    recompute = "" if plan.own_train_step else _recompute(plan)
    proposal = _accumulation(plan, measured)
    if proposal:
        return f"{problem}: {proposal}, {recompute}, or reduce the batch size."
    recompute = f"{recompute}, or " if recompute else ""
    return f"{problem}: {recompute}{'reduce the batch size' if rows > count else 'use a smaller model'}."


def _accumulation(plan: Plan, measured: Measurement | None) -> str:
    """The number of micro-batches that fits, as an imperative; "" if there is none."""
    rows, count = plan.layout.rows_per_replica, plan.options.gradient_accumulation_steps
    key = "optimizer.gradient_accumulation_steps"
    if plan.own_train_step:
        return ""
    if measured:
        fitting = (n for n in _divisors(rows) if n > count and measured.fits(n))
        best = next((n for n in fitting if _is_allowed(plan, n)), None)
        if best is None:
            return ""
        return f"set {key}={best} (about {_gib(measured.needs(best))})"
    # Activations, the largest part, are proportional to the rows of a micro-batch.
    doubled = min(2 * count, rows)
    if doubled == count or not _is_allowed(plan, doubled):
        return ""
    return f"set {key}={doubled}{' (twice the present number)' * (doubled == 2 * count)}"


def _is_allowed(plan: Plan, micro_batches: int) -> bool:
    """Whether the advice does not lead to the next rejection."""
    choice = dataclasses.replace(plan.choice, micro_batches=micro_batches)
    return not any(rule.broken(choice) for rule in compatibility.RULES)


def _recompute(plan: Plan) -> str:
    if "recompute" in plan.options.model and not plan.options.recompute:
        return "set model.recompute=blocks"
    return "wrap layers in ctl.recompute"


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
