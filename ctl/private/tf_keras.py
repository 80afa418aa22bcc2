"""The private modules of tf_keras that ctl uses, of tf_keras 2.18 to 2.21."""

import sys
import types
from typing import Any

import tensorflow as tf
import tf_keras
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
]


class _TensorFlow(types.ModuleType):
    """TensorFlow, whose `keras` is tf_keras also while `tf.keras` is Keras 3."""

    keras = tf_keras

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)


# The only module of tf_keras that uses tf.keras: a layer of tf_keras rejects an InputSpec of Keras 3.
_spectral_normalization: Any = sys.modules[tf_keras.layers.SpectralNormalization.__module__]
_spectral_normalization.tf = _TensorFlow("tensorflow")
