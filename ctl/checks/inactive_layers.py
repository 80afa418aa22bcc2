"""Names layers that would draw random numbers or update statistics in training, and do not in a step."""

from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
from typing import Any

import tensorflow as tf

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Observer
from ctl.data.autograph import convert, traced
from ctl.errors import list_some
from ctl.graphs.assignments import find_assignments
from ctl.keras import models
from ctl.keras.variables import moving_statistics, variables_of
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.rows.trace import Trace
from ctl.update.microbatches import row_count
from ctl.update.preprocessing import call_model


class InactiveLayers(Observer):
    """Compares the layers of the first model in a step with a call of it with training=True."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line if the code of a step calls layers as an evaluation does."""
        parts = [part for update in rows.trace.updates for part in update.micro_batches]
        if rows.earlier is not None or rows.trace.losses_only or not parts:
            return
        model = self.step.attributes.model
        inactive = {name for name, is_active in _layers(model, operations, rows) if not is_active}
        if not inactive:
            return
        # A layer may be called with training=False on purpose, such as one of a frozen part.
        with contextlib.suppress(Exception), futures.ThreadPoolExecutor(1) as thread:
            with tf.init_scope():  # in no strategy, as the thread
                active = thread.submit(_find_active, self.step, rows).result()
            names = sorted(inactive & active)
            if names:
                self.warn_once(
                    f"{list_some(names)} would draw random numbers or update statistics in training, "
                    "and does not in this step: pass training=training to the model in forward, or "
                    "training=True in a step of your own."
                )


def _find_active(step: BuiltStep, rows: Rows) -> set[str]:
    """Returns the names of the layers that a call of the model with training=True makes active."""
    names: set[str] = set()
    model, (batch, _) = step.attributes.model, rows.trace.inputs

    def call(batch: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        with row_mask.examples(
            count=row_count(batch), seed=rows.seed, allow_unkeyed=True, trace=Trace(batch)
        ) as own:
            call_model(model, convert(step.hooks.preprocess)(batch), training=True)
        found = _layers(model, graph.get_operations(), own)
        names.update(name for name, is_active in found if is_active)

    spec = tf.nest.map_structure(lambda v: tf.TensorSpec([2, *v.shape[1:]], v.dtype), batch)
    traced(call).get_concrete_function(spec)
    return names


def _layers(model: Any, operations: Sequence[Any], rows: Rows) -> Iterator[tuple[str, bool]]:
    """Yields the names of layers that draw or have other state than weights, and whether they do it."""
    assigned = {id(assignment.handle) for assignment in find_assignments(operations)}
    for layer in model._flatten_layers(include_self=False):
        own = getattr(models.inner(layer), "seed_generator", None)  # of Keras 3
        stream = getattr(own or getattr(layer, "_random_generator", None), "ctl_stream", None)
        if stream is not None:
            yield layer.name, stream.identity in rows.calls
        elif layer.trainable:
            ids = moving_statistics(layer) | {id(v) for v in layer._non_trainable_weights}
            variables = [v for v in variables_of(layer) if id(v) in ids]  # no vocabularies
            handles = {id(p.handle) for v in variables for p in getattr(v, "values", (v,))}
            if handles:
                yield layer.name, bool(handles & assigned)
