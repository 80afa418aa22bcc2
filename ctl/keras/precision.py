"""The dtypes of layers and variables, and the loss scale of float16."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
import tf_keras

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.keras import models
from ctl.keras.private import policy as policy_module

Optimizer: TypeAlias = tf_keras.optimizers.Optimizer


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


class Dtypes(NamedTuple):
    """The functions of a package of layers by which it keeps its global dtypes.

    Layers, losses and metrics read them when they are built. The policy is None if the user set none.
    """

    floatx: Callable[[], str]
    set_floatx: Callable[[str], None]
    policy: Callable[[], Any]
    set_policy: Callable[[Any], None]


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Sets the precision of the layers, metrics and optimizers that are built inside."""
    precision = of(name)
    # Both are needed: the policy sets the dtypes of layers, floatx those of metrics and optimizers.
    with _restored() as packages:
        for package in packages:
            package.set_floatx(precision.floatx)
            package.set_policy(precision.policy)
        yield


@contextlib.contextmanager
def floatx_scope(floatx: str) -> Iterator[None]:
    """Sets the dtype of what is built inside, unless the user set a policy."""
    with _restored() as packages:
        for package in packages:
            package.set_policy(package.policy())  # a layer may have made the default policy
            package.set_floatx(floatx)
        yield


@contextlib.contextmanager
def _restored() -> Iterator[list[Dtypes]]:
    packages = global_dtypes()
    before = [(package.floatx(), package.policy()) for package in packages]
    try:
        yield packages
    finally:
        for package, (floatx, policy) in zip(packages, before, strict=True):
            package.set_floatx(floatx)
            package.set_policy(policy)


def global_dtypes() -> list[Dtypes]:
    """Returns the global dtypes of tf_keras, and then those of the other packages of layers."""
    # If the user set no policy, a later `set_floatx` must change the default policy, which the public
    # functions would return as if it had been set.
    backend, mixed = tf_keras.backend, tf_keras.mixed_precision
    policy = lambda: policy_module._global_policy  # noqa: E731
    own = Dtypes(backend.floatx, backend.set_floatx, policy, mixed.set_global_policy)
    return [own, *filter(None, (package.dtypes() for package in models.imported()))]


def of_model(model: tf_keras.Model) -> str:
    """Returns the precision of a model's layers; of new layers of all packages if it is None."""
    if model is None:
        packages = global_dtypes()
        computed = {getattr(each.policy(), "compute_dtype", each.floatx()) for each in packages}
    else:
        computed = {v.compute_dtype for v in getattr(model, "_flatten_layers", lambda: [model])()}
    names = ("float16", "bfloat16", "float64")
    return next((name for name in names if name in computed), "float32")


def check_model(model: tf_keras.layers.Layer, precision: str) -> None:
    """Raises UsageError if the model's layers compute in another precision than the options say."""
    actual = of_model(model)
    if actual != precision:
        raise UsageError(
            f"precision is {precision!r}, but the layers of the model compute in {actual}: pass a "
            "function that builds the model, or build it under the policy "
            f"{of(precision).policy} (tf_keras.mixed_precision.set_global_policy, or "
            "keras.config.set_dtype_policy of Keras 3)."
        )


def cast_to_float32(outputs: Nest) -> Any:
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


def wrap_loss_scale(optimizer: Optimizer, name: str, loss_scale: float) -> Any:
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


def has_loss_scale(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is a LossScaleOptimizer."""
    return isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)


def inner(optimizer: Optimizer) -> Any:
    """Returns the optimizer inside of a LossScaleOptimizer; another optimizer is returned itself."""
    return optimizer.inner_optimizer if has_loss_scale(optimizer) else optimizer


def update_loss_scale(optimizer: Optimizer, finite: tf.Tensor) -> None:
    """Updates a dynamic loss scale, as tf_keras does; call it in the cross-replica context.

    Args:
        optimizer: a LossScaleOptimizer.
        finite: scalar bool, whether the gradients of the step were finite.
    """
    if not optimizer.dynamic:
        return
    # The public way, apply_gradients, would check the gradients and count the step once more. tf_keras
    # uses conditionals, for each of which a program of XLA on a GPU waits until the host has read it.
    state = optimizer._loss_scale
    scale, steps = state.current_loss_scale.read_value(), state.counter.read_value() + 1
    grows = steps >= state.growth_steps
    grown = scale * state.multiplier
    kept = tf.where(tf.logical_and(grows, tf.math.is_finite(grown)), grown, scale)
    shrunk = tf.maximum(scale / state.multiplier, 1)
    state.current_loss_scale.assign(tf.where(finite, kept, shrunk))
    state.counter.assign(tf.where(tf.logical_and(finite, tf.logical_not(grows)), steps, 0))
