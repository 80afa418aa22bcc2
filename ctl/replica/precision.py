"""Which dtype a run computes in and keeps its variables in, and the loss scale of float16."""

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a name in `runtime.precision` stands for.

    Attributes:
        policy: the tf_keras policy of the layers.
        floatx: the dtype of variables, losses, metrics and reductions.
        compute: the dtype that layers compute in.
    """

    policy: str
    floatx: str
    compute: str


PRECISIONS = {
    "float64": Precision("float64", "float64", "float64"),
    "float32": Precision("float32", "float32", "float32"),
    "bfloat16": Precision("mixed_bfloat16", "float32", "bfloat16"),
    "float16": Precision("mixed_float16", "float32", "float16"),
}


def of(name: str) -> Precision:
    """The precision of a name."""
    if name not in PRECISIONS:
        raise UsageError(f"There is no precision {name!r}: choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@contextlib.contextmanager
def precision_scope(name: str) -> Iterator[None]:
    """Makes layers, metrics and optimizers that are built inside use this precision."""
    precision = of(name)
    policy = tf_keras.mixed_precision.global_policy()
    floatx = tf_keras.backend.floatx()
    tf_keras.backend.set_floatx(precision.floatx)
    tf_keras.mixed_precision.set_global_policy(precision.policy)
    try:
        yield
    finally:
        tf_keras.backend.set_floatx(floatx)
        tf_keras.mixed_precision.set_global_policy(policy)


def cast_to_float32(outputs: Any) -> Any:
    """A model's outputs with 16-bit floats as float32: a loss is not computed in 16 bits."""
    narrow = (tf.float16, tf.bfloat16)
    return tf.nest.map_structure(
        lambda x: tf.cast(x, tf.float32) if tf.is_tensor(x) and x.dtype in narrow else x, outputs
    )


def wrap_loss_scale(optimizer: Any, name: str, loss_scale: float) -> Any:
    """The optimizer, in tf_keras' LossScaleOptimizer where the precision needs a loss scale.

    Args:
        optimizer: a tf_keras optimizer; one that is in a LossScaleOptimizer already stays as it is.
        name: the precision.
        loss_scale: a fixed scale; 0 for a dynamic one, which halves when a step overflows and
            doubles after 2,000 steps that did not (Micikevicius et al. 2018, "Mixed precision
            training").
    """
    if name != "float16" or has_loss_scale(optimizer):
        return optimizer
    if loss_scale:
        return tf_keras.mixed_precision.LossScaleOptimizer(
            optimizer, dynamic=False, initial_scale=loss_scale
        )
    return tf_keras.mixed_precision.LossScaleOptimizer(optimizer)


def has_loss_scale(optimizer: Any) -> bool:
    """Whether the optimizer is in a LossScaleOptimizer."""
    return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)


def update_loss_scale(optimizer: Any, overflow: Any) -> None:
    """Moves a dynamic loss scale; call it across replicas.

    Args:
        optimizer: a LossScaleOptimizer.
        overflow: each replica's float, infinite where the step overflowed and else 0. It stands
            for the gradients, which the optimizer would look at one by one.
    """
    if optimizer.dynamic:
        optimizer._loss_scale.update([overflow])
