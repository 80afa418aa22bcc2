"""Rejects losses, their weights and penalties that contain the number of replicas.

A loop of one's own divides by it, because it sums the gradients of the replicas. ctl divides once, by
the weight of the global batch, so the update would depend on the split. The number is a constant of the
trace: code that reads it is traced again with another number, and the constants are compared.
"""

from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import inspect
import logging
import os
import sys
from typing import Any

import tensorflow as tf

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Losses, Observer, TraceAgain
from ctl.checks import loss_trace, users_code
from ctl.configs.error_location import name_function
from ctl.data.autograph import convert, traced
from ctl.errors import UsageError
from ctl.graphs.places import place_of
from ctl.rows.trace import Trace
from ctl.update.preprocessing import call_sample_weight, preprocess

_LOG = logging.getLogger("ctl")
_NAME = "num_replicas_in_sync"
_READS = f"{_NAME}|scale_regularization_loss|compute_average_loss"
_PACKAGES = ("ctl", "keras", "tensorflow", "tf_keras")
# Its functions scale_regularization_loss and compute_average_loss read the number for the user.
_SCALES = os.path.join("ops", "nn_impl_distribute.py")
_ROWS = 2


class ReplicaCount(Observer):
    """Compares the losses, their weights and the penalties for two numbers of replicas."""

    @classmethod
    def check_losses(
        cls, step: BuiltStep, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Raises a UsageError if the losses or the penalties contain the number of replicas."""
        replicas, options = step.plan.layout.replicas, step.plan.options
        is_split = replicas > 1 and not options.allow_row_coupling
        if not is_split or not trace_again or not users_code.names(step, _READS):
            return
        build = getattr(type(step.attributes.owner), "build_model", None)
        if (
            build
            and _names_count(getattr(build, "__code__", None))
            and any(layer._callable_losses for layer in step.attributes.layers())
        ):
            _LOG.warning(
                "%s reads num_replicas_in_sync, and the model has regularizers. If the number is in "
                "their factors, the update depends on it: ctl adds a penalty once, so leave it out.",
                name_function(build),
            )

        def weigh(batch: Any) -> Any:
            return call_sample_weight(step.hooks, preprocess(step.hooks, batch), training=True)

        def trace(number: int) -> tuple[Sequence[Any], Sequence[Any]]:
            values, inputs, report = list[Any](), list[Any](), Trace()
            with counting(number):
                # The step reports the errors.
                with contextlib.suppress(Exception), report.record_collectives():
                    found = trace_again(_ROWS)
                    values, inputs = [*found.values], [found.trace.inputs]
                    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, inputs[0])
                    weights = traced(weigh).get_concrete_function(specs)
                    values, inputs = [*values, *weights.outputs], [inputs, weights.inputs]
                # A sum over the replicas may be divided by their number, but no gathered rows.
                if report.global_values:
                    values, inputs = [], []
                with contextlib.suppress(Exception):
                    penalties = traced(convert(step.hooks.regularization_losses))
                    values += penalties.get_concrete_function().outputs
            return values, inputs

        with tf.init_scope(), futures.ThreadPoolExecutor(1) as thread:  # in no strategy
            one, two = (thread.submit(trace, replicas + i).result() for i in range(2))
        if len(one[0]) != len(two[0]):  # one of them cannot be traced, or reads other replicas
            return
        difference = loss_trace.compare(*one, *two)
        if difference is not None:
            first, second = difference.values
            raise UsageError(
                f"{place_of(difference.op)} is {first} on {replicas} replicas and {second} "
                f"on {replicas + 1}: ctl divides a loss by the weight of the global batch, and adds a "
                "penalty once, so leave out the number of replicas (the rows of all are those of "
                "ctl.replica.all_gather(x)), or accept it with allow_row_coupling=True "
                "(runtime.allow_row_coupling)."
            )


def _names_count(code: Any) -> bool:
    """Returns whether the code of a function, or of one inside of it, names the number of replicas."""
    return inspect.iscode(code) and (
        _NAME in code.co_names or any(map(_names_count, code.co_consts))
    )


@contextlib.contextmanager
def counting(number: int) -> Iterator[None]:
    """Lets the user's code see another number of replicas within a `with` block."""
    kinds = (tf.distribute.Strategy, tf.distribute.ReplicaContext)
    owners = [next(each for each in kind.__mro__ if _NAME in vars(each)) for kind in kinds]
    originals = [vars(owner)[_NAME] for owner in owners]
    folders = tuple(
        os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in _PACKAGES[::2]
    )

    def replace(original: property) -> property:
        def read(self: Any) -> int:
            file = sys._getframe(1).f_code.co_filename
            is_user = file.endswith(_SCALES) or not file.startswith(folders)
            return number if is_user else original.fget(self)  # type: ignore[misc]

        return property(read)

    try:
        for owner, original in zip(owners, originals, strict=True):
            setattr(owner, _NAME, replace(original))
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            setattr(owner, _NAME, original)
