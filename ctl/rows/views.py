"""Views: several tensors of the rows of a replica's batch, one after the other on axis 0."""

import tensorflow as tf

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.rows import row_mask


def views(*rows: Nest) -> Nest:
    """Concatenates views of the rows on axis 0, for one call of a model.

        def forward(self, batch, training):
            outputs = self.model(ctl.replica.views(batch["one"], batch["two"]), training=training)
            return dict(zip(["one", "two"], tf.split(outputs, 2), strict=True))

    `ctl.SyncBatchNormalization` normalizes both views together, without padding. Draws are keyed by the
    row and the view, and `ctl.replica.all_gather` and `positions` return all rows of the first view
    before those of the second, as on one replica.

    Args:
        *rows: tensors of shape [rows, ...], or structures of them, with one entry per row each.

    Returns:
        A tensor of shape [views x rows, ...], or a structure of them.

    Raises:
        UsageError: a tensor has another number of rows than the batch.
    """
    current = row_mask.current()
    count = current.count if current else None
    expected = count if isinstance(count, int) else None
    for tensor in map(tf.convert_to_tensor, tf.nest.flatten(rows)):
        if not tensor.shape.rank or not tensor.shape[:1].is_compatible_with([expected]):
            raise UsageError(
                f"ctl.replica.views got shape {tensor.shape}, but requires [{expected or 'rows'}, ...]: "
                "one entry per row of the batch in each view."
            )
    if current:
        current.trace.views.add(len(rows))
    return tf.nest.map_structure(lambda *views: tf.concat(views, axis=0), *rows)
