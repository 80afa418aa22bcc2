"""The losses of rows of a loss object of Keras."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError, type_name


def row_losses(loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Returns the losses of rows of a loss object of tf_keras or Keras 3, as (batch, outputs) -> [rows].

    A mean over the batch is the mean of the rows' own means. As in Keras, outputs and `batch["label"]`
    may be structures.

    Raises:
        UsageError: its reduction is a sum, whose size depends on the size of the batch.
    """
    if loss.reduction == "sum":
        raise UsageError(
            f"loss_fn is {type_name(loss)} with reduction='sum', which grows with the batch: make it "
            "with reduction='sum_over_batch_size', the mean, and multiply the learning rate."
        )

    def compute(batch: Any, outputs: Any) -> tf.Tensor:
        if getattr(outputs, "_keras_mask", None) is not None:
            raise UsageError(
                f"loss_fn is {type_name(loss)}, and the outputs have a mask of Keras: pass a function "
                "that returns the losses of all tokens, and the mask as sample_weight."
            )
        losses = tf.convert_to_tensor(loss.call(batch["label"], outputs))
        if loss.reduction in ("none", None):
            return losses
        return tf.reduce_mean(losses, axis=range(1, losses.shape.rank))

    return compute
