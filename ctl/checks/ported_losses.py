"""Names what is left of another loop in the losses: what ctl adds, or divides by, itself."""

from collections.abc import Iterator, Sequence
import logging
import os
from typing import Any

import tensorflow as tf

from ctl.built.observers import Observer
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import place_of
from ctl.rows.row_mask import Rows

_LOG = logging.getLogger("ctl")
_LAYERS = os.path.join("tf_keras", "src", "engine", "base_layer.py")
_LEAST = 8  # a smaller batch size may well be another factor of a loss, such as 1 / 2


class PortedLosses(Observer):
    """Searches the losses of training steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for penalties that count twice, and for a division by the batch size."""
        if "ported" in rows.trace.call or rows.earlier is not None:
            return
        rows.trace.call["ported"] = True
        self._find_penalties(operations, rows)
        self._find_divisions(rows)

    def _find_penalties(self, operations: Sequence[Any], rows: Rows) -> None:
        traces = getattr(rows.graph, "_ctl_started", [rows.trace])  # of all replicas
        parts = [p for trace in traces for update in trace.updates for p in update.micro_batches]
        inside = {x.op for part in parts for x in ancestors(*part.losses)}
        added = [op for op in inside if _is_penalty(op)]
        # Only if ctl adds them, too: a trainer may have a regularization_losses of its own.
        if added and any(_is_penalty(op) for op in operations if op not in inside):
            _LOG.warning(
                "%s adds model.losses to the losses, and ctl adds them once, too, so that penalties "
                "count twice: leave them out.",
                place_of(added[0]),
            )

    def _find_divisions(self, rows: Rows) -> None:
        divided = [update for update in rows.trace.updates if not update.undivided]
        losses = [x for update in divided for x in update.micro_batches[0].losses]
        size = self.step.plan.layout.global_batch_size
        for op in (op for loss in losses for op in _factors(loss, size)):
            _LOG.warning(
                "%s divides the losses by %s. If that is the batch size, leave it out: ctl divides by "
                "the weight of the global batch, so that the update is 1 / %s of what it was.",
                place_of(op), size, size,
            )  # fmt: skip


def _is_penalty(op: Any) -> bool:
    """Returns whether an op computes a number of the property `losses` of a layer."""
    if not op.outputs or op.outputs[0].shape.rank != 0 or not op.outputs[0].dtype.is_floating:
        return False
    frames = op.traceback
    return any(x.name == "losses" and x.filename.endswith(_LAYERS) for x in frames)


def _factors(loss: Any, size: int) -> Iterator[Any]:
    """Yields the ops that divide a complete loss by a number."""
    while size >= _LEAST and hasattr(loss, "op"):
        op = loss.op
        if op.type in ("RealDiv", "Div", "Mul") and len(op.inputs) == 2:
            numbers: list[Any] = [
                tf.get_static_value(x) if x.shape.rank == 0 else None for x in op.inputs
            ]
            known = next((i for i, number in enumerate(numbers) if number is not None), None)
            if known is None:
                return
            wanted = 1 / size if op.type == "Mul" else size
            if abs(numbers[known] / wanted - 1) < 1e-6 and (op.type == "Mul" or known == 1):
                yield op
            loss = op.inputs[1 - known]
        elif op.type in ("Cast", "Identity", "Neg", "Squeeze", "Reshape"):
            loss = op.inputs[0]
        else:
            return
