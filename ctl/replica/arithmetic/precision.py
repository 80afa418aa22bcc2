"""The dtypes of layers and variables, and the loss scale of float16."""

from collections.abc import Iterator
import contextlib
import dataclasses
import sys
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import policy as policy_module

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of one value of `runtime.precision`.

    Attributes:
        policy: the tf_keras dtype policy of the layers.
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
    """Returns the precision with a name."""
    if name not in PRECISIONS:
        raise UsageError(f"There is no precision {name!r}: choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@contextlib.contextmanager
def precision_scope(name: str) -> Iterator[None]:
    """Sets the precision of the layers, metrics and optimizers that are built inside."""
    precision = of(name)
    # None if the user set no policy: a later `set_floatx` must change the default policy, which
    # `global_policy()` would return as if it had been set.
    policy = policy_module._global_policy
    floatx = tf_keras.backend.floatx()
    # Both are needed: the policy sets the dtypes of layers, floatx those of metrics and optimizers.
    tf_keras.backend.set_floatx(precision.floatx)
    tf_keras.mixed_precision.set_global_policy(precision.policy)
    try:
        with _keras3_scope(precision):
            yield
    finally:
        tf_keras.backend.set_floatx(floatx)
        tf_keras.mixed_precision.set_global_policy(policy)


def policies() -> list[Any]:
    """Returns the global dtype policies of tf_keras and of Keras 3, if the user has imported it."""
    config = _keras3_config()
    return [tf_keras.mixed_precision.global_policy(), *([config.dtype_policy()] if config else [])]


def _keras3_config() -> Any:
    # None while keras is only being imported.
    config: Any = getattr(sys.modules.get("keras"), "config", None)
    return config if hasattr(config, "set_dtype_policy") else None


@contextlib.contextmanager
def _keras3_scope(precision: Precision) -> Iterator[None]:
    """Sets the precision of Keras 3, if the user has imported it."""
    config = _keras3_config()
    if not config:
        yield
        return
    policy, floatx = config.dtype_policy(), config.floatx()
    config.set_floatx(precision.floatx)
    config.set_dtype_policy(precision.policy)
    try:
        yield
    finally:
        config.set_floatx(floatx)
        config.set_dtype_policy(policy)


def check_keras3() -> None:
    """Raises UsageError if a model of Keras 3 was built under another policy than the scope's."""
    expected, found = (policy.name for policy in policies())
    if found != expected:
        raise UsageError(
            f"The model of Keras 3 was built under the dtype policy {found} instead of {expected}: "
            "import keras at the top of the file, set runtime.precision instead of Keras' global "
            "policy, or give single layers a dtype."
        )


def cast_to_float32(outputs: Any) -> Any:
    """Casts 16-bit floats of a model's outputs to float32, in which losses are computed."""
    # 8 or 11 bits are too few for the sum of a cross entropy; float64 outputs stay as they are.
    half = (tf.float16, tf.bfloat16)

    def cast(output: Any) -> Any:
        if not tf.is_tensor(output) or output.dtype not in half:
            return output
        result = tf.cast(output, tf.float32)
        # tf_keras' losses and metrics read the mask of Embedding(mask_zero=True) and Masking here.
        if hasattr(output, "_keras_mask"):
            result._keras_mask = output._keras_mask
        return result

    return tf.nest.map_structure(cast, outputs)


def wrap_loss_scale(optimizer: Any, name: str, loss_scale: float) -> Any:
    """Wraps an optimizer into tf_keras' LossScaleOptimizer if the precision requires a loss scale.

    Args:
        optimizer: a tf_keras optimizer; a LossScaleOptimizer is returned unchanged.
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
    """Returns whether an optimizer is a LossScaleOptimizer."""
    return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)


def update_loss_scale(optimizer: Any, overflow: Any) -> None:
    """Updates a dynamic loss scale; call it in the cross-replica context.

    Args:
        optimizer: a LossScaleOptimizer.
        overflow: the replicas' float: infinity if the step overflowed, else 0. The loss scale checks
            it in place of the gradients, which are already checked.
    """
    # The public way, apply_gradients, would check the gradients and count the step once more.
    if optimizer.dynamic:
        optimizer._loss_scale.update([overflow])
