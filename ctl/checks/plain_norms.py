"""Names the layers that normalize a part of the batch by its own statistics."""

from collections.abc import Sequence
from typing import Any

import tf_keras

from ctl.built.observers import Observer
from ctl.errors import list_some
from ctl.graphs.assignments import find_assignments
from ctl.rows.row_mask import Rows
from ctl.update.snapshot import handles


class PlainNorms(Observer):
    """Searches for batch normalizations by their statistics, which a step assigns."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for the layers, each once; it is no error, since it is the usual practice."""
        plan = self.step.plan
        is_split = plan.is_split or not plan.even
        if rows.earlier is not None or not is_split:
            return
        # A layer that is frozen, or called with training=False, uses its moving statistics.
        assigned = {id(each.handle) for each in find_assignments(operations)}
        plain = [
            v.name
            for v in self.step.attributes.layers()
            # A synchronized one of Keras 3 is that of ctl, and one of tf_keras counts padding.
            if hasattr(v, "moving_mean")
            and (
                isinstance(v, tf_keras.layers.BatchNormalization)
                or not getattr(v, "synchronized", True)
            )
            and not getattr(v, "counts_all_rows", False)
            and handles([v.moving_mean]) & assigned
        ]
        if plain:
            self.warn_once(
                "Batch normalization of a part of the batch, including padding: the update depends on "
                f"how it is split ({list_some(plain)}). Use ctl.SyncBatchNormalization, or "
                "model.sync_batch_norm=True."
            )
