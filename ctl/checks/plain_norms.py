"""Names the layers that normalize a part of the batch by its own statistics."""

from collections.abc import Sequence
import logging
from typing import Any

import tf_keras

from ctl.built.observers import Observer
from ctl.errors import list_some
from ctl.graphs.assignments import find_assignments
from ctl.rows.row_mask import Rows
from ctl.update.snapshot import handles

_LOG = logging.getLogger("ctl")


class PlainNorms(Observer):
    """Searches for batch normalizations by their statistics, which a step assigns."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for the layers, each once; it is no error, since it is the usual practice."""
        plan = self.step.plan
        is_whole = plan.layout.replicas == plan.micro_batches == 1 and plan.even
        if is_whole or rows.earlier is not None:
            return
        # A layer that is frozen, or called with training=False, uses its moving statistics.
        assigned = {id(each.handle) for each in find_assignments(operations)}
        plain = [
            layer.name
            for layer in self.step.attributes.model._flatten_layers()
            if (
                isinstance(layer, tf_keras.layers.BatchNormalization)
                or getattr(layer, "synchronized", None) is False  # of Keras 3
            )
            and not getattr(layer, "counts_all_rows", False)
            and handles([layer.moving_mean]) & assigned
        ]
        printed = vars(self.step).setdefault("printed_of_norms", set())  # by any of its traces
        if {*plain} - printed:
            printed.update(plain)
            _LOG.warning(
                "Batch normalization of a part of the batch, including padding: the update depends on "
                "how it is split (%s). Use ctl.SyncBatchNormalization, or model.sync_batch_norm=True.",
                list_some(plain),
            )
