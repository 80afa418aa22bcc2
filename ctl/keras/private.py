"""The private modules of tf_keras that ctl uses, of tf_keras 2.18 to 2.21."""

from tf_keras.src import backend
from tf_keras.src.engine import base_layer_utils, compile_utils
from tf_keras.src.mixed_precision import autocast_variable, policy
from tf_keras.src.utils import losses_utils

__all__ = [
    "autocast_variable", "backend", "base_layer_utils", "compile_utils", "losses_utils", "policy",
]  # fmt: skip
