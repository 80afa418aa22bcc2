"""The observers of a step: the checks of the user's code, which are rows of a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import importlib
import logging
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace

_LOG = logging.getLogger("ctl")
# The classes of the observers as "module:class", relative to `ctl.checks`, in their order.
OBSERVERS = (
    "onednn:WrongGradients",
    "left_tensors:LeftTensors",
    "random_search:RandomOps",
    "random_search:HostRandom",
    "row_coupling:RowCoupling",
    "replica_count:ReplicaCount",
    "split_updates:SplitUpdates",
    "metric_rows:MetricRows",
    "plain_norms:PlainNorms",
    "local_state:LocalState",
    "copies:Copies",
    "inactive_layers:InactiveLayers",
)


class Losses(NamedTuple):
    """The losses of a forward pass that was traced while the step was built.

    Attributes:
        values: the losses, [rows, ...] each.
        trace: what the forward pass reported.
    """

    values: Sequence[tf.Tensor]
    trace: Trace


TraceAgain = Callable[[int], Losses]


class Observer:
    """Checks the user's code of a step; a subclass overrides what it needs. Errors are `UsageError`s.

    One is created before each trace of a step or an evaluation on one replica.

    Args:
        step: the `BuiltStep`.
    """

    def __init__(self, step: Any):
        self.step = step

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Checks a complete trace.

        Args:
            operations: the ops that the trace has created; they may call functions.
            rows: the rows of the replica, with what the code reported.
        """

    def warn_once(self, line: str) -> None:
        """Prints a line, unless it was printed after another trace of the step or an evaluation."""
        printed = vars(self.step).setdefault("printed", set())
        if line not in printed:
            printed.add(line)
            _LOG.warning("%s", line)

    @classmethod
    def check_losses(
        cls, step: Any, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Checks the losses of the first batch, once the step is built.

        Args:
            step: the `BuiltStep`.
            losses: the losses of any number of rows; None if they require a static number.
            trace_again: returns the losses of a static number of rows; not required with `losses`.
            name: the user's loss function.
        """

    @classmethod
    def check_metric(cls, metric: Any, values: Mapping[str, tf.Tensor], name: str) -> None:
        """Checks the arguments of a metric's update, which has not run yet.

        Args:
            metric: the metric.
            values: "labels", "outputs" and possibly "sample_weight" of the update, [rows, ...] each.
            name: the name of the metric in messages.
        """

    @classmethod
    def check_variables(cls, items: Mapping[str, Any]) -> None:
        """Checks the variables after the first steps.

        Args:
            items: name -> model, optimizer, module or variable that the step may assign.
        """


@functools.cache
def load() -> tuple[type[Observer], ...]:
    """Imports the observers of the table."""
    rows = (row.split(":") for row in OBSERVERS)
    return tuple(
        getattr(importlib.import_module(f"ctl.checks.{module}"), name) for module, name in rows
    )


@contextlib.contextmanager
def observe(step: Any, rows: Rows) -> Iterator[None]:
    """Lets the observers of a step search what the code inside the `with` block traces.

    Args:
        step: the `BuiltStep`.
        rows: the rows that the code computes. Eager execution has no graph to search.
    """
    graph = rows.graph
    if graph is None:
        yield
        return
    observers = [observer(step) for observer in load()]
    before = len(graph.get_operations())
    is_evaluation = rows.earlier is not None
    collectives = contextlib.nullcontext() if is_evaluation else rows.trace.record_collectives()
    with keep_caching_device(), collectives:
        yield
    operations = graph.get_operations()[before:]
    for observer in observers:
        observer.search(operations, rows)


@contextlib.contextmanager
def keep_caching_device() -> Iterator[None]:
    """Restores the device of variables after an error.

    tf.map_fn and tf.scan would leave their own, with which no model can be built.
    """
    scope = tf.compat.v1.get_variable_scope()
    device = scope.caching_device
    try:
        yield
    except BaseException:
        scope.set_caching_device(device)
        raise
