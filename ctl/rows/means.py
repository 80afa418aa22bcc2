"""The losses of single rows, from a function of a library that returns their mean."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl.configs.error_location import name_function
from ctl.data.autograph import convert
from ctl.errors import UsageError, type_name
from ctl.rows import row_mask
from ctl.rows.assertions import require


def mean_of_rows(function: Callable[..., Any], *rows: Any) -> tf.Tensor:
    """Returns the losses of the rows, from a function that returns the mean of the losses of its rows.

        def per_example_loss(self, batch, outputs):
            return ctl.replica.mean_of_rows(library.loss, batch["label"], outputs)

    The function is called for each row, so that rows of padding and sample weights count as for any
    other loss. It is also called for all rows of the replica: what it returns must be the mean. Call
    models and layers outside of it, for all rows at once.

    Args:
        function: tensors of shape [rows, ...], in the structures of `rows` -> a scalar.
        *rows: tensors of shape [rows, ...], or structures of them; scalars are the same for each row.

    Returns:
        [rows] losses.

    Raises:
        UsageError: the function does not return a scalar; or, when the step runs, not a mean of rows.
    """
    tensors = [tf.convert_to_tensor(each) for each in tf.nest.flatten(rows)]
    places = [i for i, each in enumerate(tensors) if each.shape.rank != 0]

    def compute(values: list[tf.Tensor]) -> tf.Tensor:
        flat = [*tensors]
        for place, value in zip(places, values, strict=True):
            flat[place] = value
        mean = convert(function)(*tf.nest.pack_sequence_as(rows, flat))
        shape = getattr(mean, "shape", None)
        if shape is None or shape.rank != 0:
            found = type_name(mean) if shape is None else f"shape {shape}"
            raise UsageError(
                f"{name_function(function)} returned {found}, but must return the mean of the rows, a "
                'scalar: without loss="mean" and mean_of_rows, return one loss per row.'
            )
        return mean

    of_rows = [tensors[place] for place in places]
    losses = tf.vectorized_map(lambda row: compute([each[tf.newaxis] for each in row]), of_rows)
    losses, current = tf.identity(losses), row_mask.current() or row_mask.Rows()
    mean, scale = tf.reduce_mean(losses), tf.reduce_mean(tf.abs(losses))
    whole = tf.stop_gradient(compute(of_rows))
    bound = {8: 1e-8, 4: 1e-3}.get(losses.dtype.size, 2e-2)
    tolerance = tf.cast(losses.dtype.as_numpy_dtype(bound), mean.dtype)
    checked = require(
        tf.logical_not(tf.abs(whole - mean) > tolerance * scale),  # NaN is left to the other checks
        losses,
        f"{name_function(function)} returned {{}} for the rows of a replica, but {{}} is the mean of "
        "what it returns for each of them: it is no mean of rows. Divide a sum by the number of its "
        "rows; a loss that compares rows takes those of ctl.replica.all_gather.",
        lambda: (whole, mean),
    )
    current.trace.row_wise += [(losses, of_rows), (checked, of_rows)]
    return checked
