"""The variables of layers, models and modules."""

from typing import Any

from ctl.private.tf_keras import base_layer_utils


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
