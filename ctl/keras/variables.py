"""The variables of layers, models and modules, and checks of those that an update trains."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError, list_some
from ctl.hardware import strategies
from ctl.keras.precision import Optimizer
from ctl.keras.private import base_layer_utils


def variables_of(module: Any) -> list[Any]:
    """Returns the variables of a layer, a model or a `tf.Module`.

    The vocabulary of a layer such as TextVectorization is one of its `variables`, but is a lookup table.
    """
    table = base_layer_utils.TrackableWeightHandler
    return [variable for variable in module.variables if not isinstance(variable, table)]


def moving_statistics(model: Any, *, plain: bool = False) -> set[int]:
    """Returns the ids of the moving statistics of the batch normalizations of a model.

    Args:
        model: a model or a layer.
        plain: return only the statistics of tf_keras layers that are not synchronized.
    """
    names = ("moving_mean", "moving_variance", "renorm_mean", "renorm_stddev")
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "moving_mean")]
    if plain:
        layers = [v for v in layers if getattr(v, "synchronized", None) is False]
    return {id(getattr(layer, name, None)) for layer in layers for name in names}


def check_scope(variables: Iterable[tf.Variable], strategy: tf.distribute.Strategy) -> None:
    """Raises a UsageError if variables are no copies on the replicas of a strategy."""
    spec = strategies.spec_of(strategy)
    in_scope = strategy.extended.variable_created_in_scope
    outside = [v.name for v in variables if spec.replica_values and not in_scope(v)]
    if outside:
        raise UsageError(
            f"{list_some(outside)}, which the step updates, was created outside the strategy's scope: "
            "build it in build_model or `with self.build_scope():`, or in `with strategy.scope():`."
        )


def check_known(
    optimizer: Optimizer, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy
) -> None:
    """Raises a UsageError if an optimizer was built for other variables than those of `minimize`."""
    if strategy.num_replicas_in_sync > 1:
        # The scalars of an optimizer are assigned once, wherever they were created.
        check_scope([*variables, *(v for v in optimizer.variables if v.shape.rank)], strategy)
    unknown = unknown_variables(optimizer, variables)
    if unknown:
        raise UsageError(
            f"minimize got {list_some(unknown)}, for which its optimizer has no slot variables: make a "
            "second optimizer in build_scope() and pass it as optimizer=..., or pass variables of "
            "self.model."
        )


def unknown_variables(optimizer: Optimizer, variables: Sequence[tf.Variable]) -> list[str]:
    """Returns the variables that a built optimizer was not built for, by name."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "_built", False):
        return []
    return [v.name for v in variables if optimizer._var_key(v) not in optimizer._index_dict]


def penalties(
    layers: Iterable[tf_keras.layers.Layer], variables: Sequence[tf.Variable]
) -> list[tf.Tensor]:
    """Returns the regularization losses of the layers that hold some of the variables.

    Args:
        layers: the layers of all models.
        variables: the variables that an update trains, of any model.
    """
    keys = {id(variable) for variable in variables}
    losses: list[tf.Tensor] = []
    functions: dict[int, Callable[[], tf.Tensor]] = {}
    unique = {id(each): each for each in layers}  # several models may have a layer
    for layer in unique.values():
        own = (*layer._trainable_weights, *layer._non_trainable_weights)
        if any(id(variable) in keys for variable in own):
            losses += [*(layer._eager_losses or layer._losses)]
            for loss in layer._callable_losses:
                # In Keras 3 every layer that holds a variable has its penalty.
                shared = isinstance(loss.args[0], tf.Variable)
                functions[id(loss.args[0] if shared else loss)] = loss
    return [*losses, *(loss() for loss in functions.values())]
