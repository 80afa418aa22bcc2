"""Proposes changes to the options if a training step does not fit into memory."""

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import re
from typing import Any

import tensorflow as tf

from ctl.built import memory_estimate
from ctl.built.inner_loop import InnerLoop, TrainerOwner
from ctl.built.memory_estimate import MemoryEstimate
from ctl.configs import option_keys
from ctl.errors import UsageError
from ctl.hardware import device_memory, devices
from ctl.parts import sharded_optimizer
from ctl.update.plan import Plan

# "Too many open files" raises the same exception.
_MEMORY = re.compile(r"\bOOM\b|memory|allocat", re.IGNORECASE)
# Python, code in the input pipeline, and libraries of GPUs raise other types. A thread needs memory for
# its stack. oneDNN does not say why a primitive failed.
_OTHER_TYPES = re.compile(
    "MemoryError|OUT_OF_MEMORY|ALLOC_FAILED|out of memory|Cannot allocate memory"
    "|can't start new thread|received an exception: ?Status"
)
USABLE = 0.9  # of the limit, because of fragmentation and the work space of kernels
_LOG = logging.getLogger("ctl")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The memory of a GPU on which a step did not fit, and what the step needs.

    Attributes:
        estimate: the step's memory, by part.
        limit: the bytes that TensorFlow may allocate.
        current: the bytes that are allocated between two steps, such as the variables.
        savings: option -> the bytes that its part would save; without options that are on already.
    """

    estimate: MemoryEstimate
    limit: int
    current: int
    savings: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def needs(self, micro_batches: int, option: str = "") -> int:
        """Returns the bytes that a step needs with other options.

        Args:
            micro_batches: the number of micro-batches.
            option: an option that is set to true in addition, of `savings`.
        """
        # The estimate of the variables alone would omit the other memory of the program.
        size = max(self.current, self.estimate.persistent) + self.estimate.step_bytes(micro_batches)
        return size - self.savings.get(option, 0)

    def fits(self, micro_batches: int, option: str = "") -> bool:
        """Returns whether a step with these options fits."""
        return self.needs(micro_batches, option) <= USABLE * self.limit


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an exception, or one that it was raised from, is about memory."""
    while error is not None:
        exhausted = isinstance(error, tf.errors.ResourceExhaustedError)
        text = f"{type(error).__name__}: {error}"
        if (exhausted and _MEMORY.search(text)) or _OTHER_TYPES.search(text):
            return True
        error = error.__cause__ or error.__context__
    return False


def explain(error: BaseException, loop: InnerLoop | None) -> str:
    """Returns the advice if a trainer's step ran out of memory; "" for other errors."""
    exhausted = isinstance(error, tf.errors.ResourceExhaustedError) and is_out_of_memory(error)
    if loop is None or not exhausted:
        return ""
    return advice(loop.plan, measure(loop.trainer))


def measure(trainer: TrainerOwner) -> Measurement | None:
    """Measures the GPU of the first replica and estimates the step; None if one of them is not known.

    Args:
        trainer: a `StandardTrainer` whose step ran out of memory.
    """
    device = devices.replica_devices(trainer.strategy)[0]
    limit = device_memory.gpu_memory_limit(device)
    if limit is None:
        return None
    try:
        current = tf.config.experimental.get_memory_info(device)["current"]
        estimate = memory_estimate.estimate(trainer)
        return Measurement(estimate, limit, current, _savings(trainer, estimate))
    except Exception as error:  # the message about the memory must not be lost
        _LOG.debug("The memory of the step is not estimated: %s", error)
        return None


def advice(plan: Plan, measured: Measurement | None = None) -> str:
    """Returns one line: what did not fit, and what would fit.

    Args:
        plan: the trainer's resolved options.
        measured: the memory; without it the line proposes to halve the largest part.
    """
    rows, count = plan.layout.rows_per_replica, plan.options.micro_batches
    division = f" in {count} micro-batches" if count > 1 else ""
    problem = f"The step ran out of memory with {rows} rows per replica{division}"
    present = plan.micro_batches
    if measured and measured.fits(present):
        measured = None  # the estimate omits something
    if measured:
        needed, limit = _gib(measured.needs(present)), _gib(measured.limit)
        problem += f", which need about {needed} of {limit} on the device"
    # Neither has an effect in a user's own train_step.
    proposals = [] if plan.own_train_step else [*_proposals(plan, measured), _recompute(plan)]
    proposals.append("reduce the batch size" if rows > count else "use a smaller model")
    return f"{problem}: {_join(proposals)}."


def _proposals(plan: Plan, measured: Measurement | None) -> list[str]:
    """Returns the changes that fit, as imperatives; without a measurement, those likely to fit."""
    rows, count = plan.layout.rows_per_replica, plan.options.micro_batches
    key, present = "optimizer.micro_batches", plan.micro_batches
    if measured is None:
        # Activations, the largest part, are proportional to the rows of a micro-batch.
        doubled = min(2 * count, rows)
        if doubled == count or not _is_allowed(plan, doubled):
            return []
        return [f"set {key}={doubled}{' (twice the present number)' * (doubled == 2 * count)}"]
    numbers = [n for n in range(count + 1, rows + 1) if rows % n == 0 and _is_allowed(plan, n)]
    proposals = []
    best = next((n for n in numbers if measured.fits(n)), None)
    if best:
        proposals.append(f"set {key}={best} (about {_gib(measured.needs(best))})")
    for option in measured.savings:
        if not _is_allowed(plan, count, option):
            continue
        both = next((n for n in (present, *numbers) if measured.fits(n, option)), None)
        if both == present or (both and not best):
            size = _gib(measured.needs(both, option))
            more = f" and {key}={both}" if both != present else ""
            proposals.append(f"set {option_keys.OPTION_KEYS[option]}=true{more} (about {size})")
    return proposals


def _savings(trainer: TrainerOwner, estimate: MemoryEstimate) -> dict[str, int]:
    if trainer.options.shard_state:
        return {}
    replicas = trainer.strategy.num_replicas_in_sync
    size = sharded_optimizer.saved_bytes(trainer.optimizer, estimate.slots, replicas)
    return {"shard_state": size} if size else {}


def _is_allowed(plan: Plan, micro_batches: int, option: str = "") -> bool:
    """Returns whether these options are valid, so that the advice does not lead to a rejection."""
    changes: dict[str, Any] = {"optimizer.micro_batches": micro_batches}
    changes |= {option_keys.OPTION_KEYS[option]: True} if option else {}
    try:
        option_keys.check_rules({**plan.values, **changes})
    except UsageError:
        return False
    return True


def _recompute(plan: Plan) -> str:
    if "recompute" in plan.options.model and not plan.options.recompute:
        return "set model.recompute=blocks"
    return "wrap layers in ctl.recompute"


def _join(proposals: Sequence[str]) -> str:
    if len(proposals) < 3:
        return ", or ".join(proposals)
    return f"{', '.join(proposals[:-1])}, or {proposals[-1]}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
