"""Collects values of every example of an evaluation, for metrics that are not sums over batches."""

from collections.abc import Callable, Mapping
import math
import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.configs.error_location import error_location
from ctl.errors import UsageError, type_name
from ctl.hardware.collectives import ProcessGroup
from ctl.keras import precision
from ctl.rows.gather import all_gather


class CollectedRows:
    """Collects the rows of an evaluation, in order, in the memory of the host.

        rows = CollectedRows(limit_mib=1024)
        rows.add({"score": tf.constant([0.1, 0.7])})
        rows.take()                                 # {"score": [0.1, 0.7]}

    Args:
        limit_mib: MiB that the rows may use.
        processes: those that collect. Only the chief keeps the rows; the others check the limit, so that
            every process ends at the same step.
    """

    def __init__(self, limit_mib: float, processes: ProcessGroup):
        self._limit_mib = limit_mib
        self.processes = processes
        self._bytes = 0
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, rows: Mapping[str, tf.Tensor]) -> "CollectedRows":
        """Adds the rows of a global batch, and returns this object.

        Raises:
            UsageError: the limit is exceeded.
        """
        # The sizes are the same in every process, whether it keeps the rows or not.
        self._bytes += sum(math.prod(v.shape) * v.dtype.size for v in rows.values())
        if self._bytes > self._limit_mib * 2**20:
            raise UsageError(
                f"The values of collect_outputs exceed {self._limit_mib:g} MiB, the limit "
                "collect_limit_mib of the trainer: collect less per example, such as the class instead "
                "of all scores, or set collect_limit_mib in the class."
            )
        if self.processes.is_chief:
            for name, value in rows.items():
                self._parts.setdefault(name, []).append(value.numpy())
        return self

    def take(self) -> dict[str, np.ndarray]:
        """Returns the values of all rows by name, [examples, ...], and forgets them."""
        # One name after the other, so that at most one is in memory twice.
        return {name: np.concatenate(self._parts.pop(name)) for name in list(self._parts)}


def gather(values: object, rows: int | tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the result of `collect_outputs` for the rows of all replicas; see `check_values`."""
    gathered: dict[str, tf.Tensor] = all_gather(
        precision.cast_to_float32(check_values(values, rows))
    )
    return gathered


def check_values(values: object, rows: int | tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the result of `collect_outputs` as tensors.

    Args:
        values: the result.
        rows: the number of rows of the batch.

    Raises:
        UsageError: it is not a dict of name -> tensor of numbers with one entry per row.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UsageError(
            f"collect_outputs returned {type_name(values)}, but must return a dict of name -> tensor."
        )
    for name, value in values.items():
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
            raise UsageError(
                f"collect_outputs returned a {type(value).__name__} for {name!r}: return a dense "
                "tensor, such as value.to_tensor(shape=[None, longest])."
            )
        if value is not None and tf.convert_to_tensor(value).dtype == tf.string:
            raise UsageError(
                f"collect_outputs returned strings for {name!r}, but replicas exchange numbers only: "
                "return numbers such as token ids or a column with the number of the example, and look "
                "the texts up in compute_metrics."
            )
        shape = None if value is None else tf.convert_to_tensor(value).shape
        # A size that is known later is compared by `all_gather`.
        static = rows if isinstance(rows, int) else None
        if shape is None or shape.rank == 0 or not shape[:1].is_compatible_with([static]):
            shown = "None" if shape is None else f"shape {shape}"
            raise UsageError(
                f"collect_outputs returned {shown} for {name!r}, but must return [rows, ...], one entry "
                "per row of the batch: return it in this form, or leave it out."
            )
    return {name: tf.convert_to_tensor(value) for name, value in values.items()}


def compute(
    function: Callable[[dict[str, np.ndarray]], Mapping[str, float]], rows: CollectedRows
) -> dict[str, float]:
    """Calls `compute_metrics` in the chief; returns its metrics in every process (collective).

    Raises:
        UsageError: `compute_metrics` raised an exception, or did not return numbers; in every process.
    """
    failure: Exception | None = None
    outcome: dict[str, Any] = {}
    if rows.processes.is_chief:
        try:
            outcome["metrics"] = _check_metrics(function(rows.take()))
        except Exception as error:  # the other processes wait for the result
            failure = error
            outcome["error"] = error_location(error)
    outcome = rows.processes.broadcast_json_from_chief(outcome)
    if failure:
        raise failure  # the user's own error, which the other processes cannot raise
    if "error" in outcome:
        raise UsageError(f"compute_metrics failed in the chief: {outcome['error']}")
    metrics: dict[str, float] = outcome["metrics"]
    return metrics


def _check_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"compute_metrics returned {type_name(metrics)}, but must return a dict of name -> number."
        )
    checked = {}
    for name, value in metrics.items():
        is_array = isinstance(value, np.ndarray) or tf.is_tensor(value)
        number = np.asarray(value).item() if is_array and np.size(value) == 1 else value
        if not isinstance(name, str) or not isinstance(number, numbers.Real):
            raise UsageError(
                f"compute_metrics returned {type_name(value)} for {name!r}, but must return a number."
            )
        checked[name] = float(number)
    return checked
