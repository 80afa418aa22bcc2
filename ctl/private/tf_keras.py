"""The private modules of tf_keras that ctl uses, of tf_keras 2.18 to 2.21."""

from typing import Any

from tf_keras.src import backend
from tf_keras.src.engine import base_layer_utils, compile_utils
from tf_keras.src.mixed_precision import autocast_variable, policy
from tf_keras.src.utils import losses_utils

__all__ = [
    "autocast_variable",
    "backend",
    "base_layer_utils",
    "compile_utils",
    "losses_utils",
    "policy",
    "variables_of",
]


def variables_of(module: Any) -> list[Any]:
    """Returns the variables of a layer, a model or a `tf.Module`.

    The vocabulary of a layer such as TextVectorization is one of its `variables`, but is a lookup table.
    """
    table = base_layer_utils.TrackableWeightHandler
    return [variable for variable in module.variables if not isinstance(variable, table)]
