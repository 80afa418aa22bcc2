"""Preparations of models: what ctl changes in layers of Keras, as the rows of a table."""

from collections.abc import Callable
import importlib
from typing import Any

# A row is "module:function", relative to `ctl.replica`, or a module whose import changes classes of
# Keras or functions of TensorFlow. The function is called as prepare(model, seed, scope=...), and again
# if layers may have been created since.
PREPARATIONS = (
    "layers.penalties",
    "layers.layer_metrics:prepare",
    "layers.keras_attention:prepare",
    "layers.compiled_nn",
    "random.image_layers",
    "random.dropout:key_random_layers",
)
_SYNCHRONIZE = "layers.batch_norm:convert_sync_batch_norm"


def _load(row: str) -> Callable[..., Any] | None:
    module, _, name = row.partition(":")
    imported = importlib.import_module(f"ctl.replica.{module}")
    return getattr(imported, name) if name else None


# Here, because classes of Keras must be changed before a model is built.
_FUNCTIONS = [function for function in map(_load, PREPARATIONS) if function]


def prepare(model: Any, seed: int, *, scope: str = "model") -> None:
    """Prepares the layers of a model for the steps that are traced later; may be called again.

    Args:
        model: a model of tf_keras, or the adapter of one of Keras 3.
        seed: the seed of the run.
        scope: the name of the model, which distinguishes the layers of several models.
    """
    for function in _FUNCTIONS:
        function(model, seed, scope=scope)


def synchronize_batch_norm(model: Any) -> None:
    """Makes the plain batch normalizations of a model use the statistics of the global batch."""
    convert = _load(_SYNCHRONIZE)
    assert convert is not None
    convert(model)
