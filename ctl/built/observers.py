"""The observers of a step: the checks of the user's code, which are rows of a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.configs.error_location import name_function
from ctl.errors import Failure, LostWorker, UsageError
from ctl.rows import replicas
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace

if TYPE_CHECKING:  # it creates the observers
    from ctl.built.built_step import BuiltStep

_LOG = logging.getLogger("ctl")
_SHOWN = 200  # characters of an error
# The classes of the observers as "module:class", relative to `ctl.checks`, in their order.
OBSERVERS = (
    "onednn:WrongGradients",
    "left_tensors:LeftTensors",
    "random_search:RandomOps",
    "python_random:HostRandom",
    "shared_resources:SharedResources",
    "local_state:LocalState",
    "outer_state:OuterState",
    "row_coupling:RowCoupling",
    "row_count:RowCount",
    "ported_losses:PortedLosses",
    "replica_count:ReplicaCount",
    "split_updates:SplitUpdates",
    "metric_rows:MetricRows",
    "plain_norms:PlainNorms",
    "copies:Copies",
    "inactive_layers:InactiveLayers",
    "outer_numbers:OuterNumbers",
)
# Those that check what several replicas or micro-batches may do, none of them a metric.
_OF_PARTS = ("left_tensors", "local_state", "outer_state", "replica_count", "copies")


class Losses(NamedTuple):
    """The losses of a forward pass that was traced while the step was built.

    Attributes:
        values: the losses, [rows, ...] each.
        trace: what the forward pass reported.
        weights: what `sample_weight` returned, as tensors.
    """

    values: Sequence[tf.Tensor]
    trace: Trace
    weights: Sequence[tf.Tensor] = ()


TraceAgain = Callable[[int], Losses]


class Observer:
    """Checks the user's code of a step; a subclass overrides what it needs. Errors are `UsageError`s.

    One is created before each trace of a step or an evaluation on one replica.

    Args:
        step: the `BuiltStep`.
    """

    def __init__(self, step: "BuiltStep"):
        self.step = step

    def search(self, operations: Sequence[tf.Operation], rows: Rows) -> None:
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
        cls, step: "BuiltStep", losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Checks the losses of the first batch, once the step is built.

        Args:
            step: the `BuiltStep`.
            losses: the losses of any number of rows; None if they require a static number.
            trace_again: returns the losses of a static number of rows; not required with `losses`.
            name: the user's loss function.
        """

    @classmethod
    def check_metric(
        cls, metric: tf_keras.metrics.Metric, values: Mapping[str, tf.Tensor], name: str
    ) -> None:
        """Checks the arguments of a metric's update, which has not run yet.

        Args:
            metric: the metric.
            values: "labels", "outputs" and possibly "sample_weight" of the update, [rows, ...] each.
            name: the name of the metric in messages.
        """

    @classmethod
    def check_variables(cls, items: Mapping[str, tf.Module]) -> None:
        """Checks the variables after the first steps.

        Args:
            items: name -> model, optimizer, module or variable that the step may assign.
        """


@functools.cache
def load(*, split: bool) -> tuple[type[Observer], ...]:
    """Imports the observers of the table.

    Args:
        split: whether several replicas or micro-batches compute the global batch.
    """
    rows = (row.split(":") for row in OBSERVERS)
    return tuple(
        getattr(importlib.import_module(f"ctl.checks.{module}"), name)
        for module, name in rows
        if split or module not in _OF_PARTS
    )


@contextlib.contextmanager
def observe(step: "BuiltStep", rows: Rows) -> Iterator[None]:
    """Lets the observers of a step search what the code inside the `with` block traces.

    Args:
        step: the `BuiltStep`.
        rows: the rows that the code computes. Eager execution has no graph to search.
    """
    graph = rows.graph
    if graph is None:
        yield
        return
    # A function of the user may call several steps, and one of them several times.
    calls = graph._ctl_calls = getattr(graph, "_ctl_calls", {})
    own = step, replicas.local_number()
    number = calls[own] = calls.get(own, 0) + 1
    rows.trace.call = calls.setdefault((step, "call", number), {})
    observers = [observer(step) for observer in load(split=step.plan.is_split)]
    before = len(graph.get_operations())
    is_evaluation = rows.earlier is not None
    collectives = contextlib.nullcontext() if is_evaluation else rows.trace.record_collectives()
    with keep_caching_device(), collectives:
        yield
    operations = graph.get_operations()[before:]
    for observer in observers:
        checked(observer.search, operations, rows)


def checked(check: Callable[..., object], *arguments: Any) -> None:
    """Calls a check of the user's code; one that fails itself prints a line, and the step trains.

    Args:
        check: a method of an observer, or a check that it has returned; mistakes are `UsageError`s.
        *arguments: its arguments.
    """
    try:
        check(*arguments)
    except (UsageError, Failure, LostWorker):
        raise
    except Exception as error:
        name, line = name_function(check), " ".join(str(error).split())[:_SHOWN]
        _LOG.warning(
            "ctl cannot check this step (%s: %s: %s), and trains without this check: `ctl check` "
            "and ctl.testing.check_loop_equivalence measure whether its update depends on the split.",
            name, type(error).__name__, line,
        )  # fmt: skip


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
