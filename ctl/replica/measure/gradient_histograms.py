"""Histograms of the gradients of a step, for TensorBoard."""

from collections.abc import Sequence

import tensorflow as tf

from ctl.replica.arithmetic.gradients import Gradient, sum_rows


def write_histograms(
    gradients: Sequence[Gradient],
    variables: Sequence[tf.Variable],
    *,
    interval: int,
    step: tf.Tensor,
) -> None:
    """Writes the gradients of the global batch, if the step is a multiple of the interval.

    Args:
        gradients: the gradients, not clipped; None if a variable has none.
        variables: the variables.
        interval: steps between two histograms.
        step: scalar, the number of consumed batches.
    """
    with tf.summary.record_if(tf.equal(step % interval, 0)):
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                values = sum_rows(gradient)
                values = values.values if isinstance(values, tf.IndexedSlices) else values
                tf.summary.histogram(f"gradients/{variable.name.removesuffix(':0')}", values)
