"""The variables of layers, models and modules."""

from typing import Any

from ctl.private.tf_keras import base_layer_utils


def variables_of(module: Any) -> list[Any]:
    """Returns the variables of a layer, a model or a `tf.Module`.

    The vocabulary of a layer such as TextVectorization is one of its `variables`, but is a lookup table.
    """
    table = base_layer_utils.TrackableWeightHandler
    return [variable for variable in module.variables if not isinstance(variable, table)]
