"""Preparations of models: what ctl changes in layers of Keras, as the rows of a table."""

from typing import Any

from ctl.private import replaced

# A row is "module:function". The function is called as prepare(model, seed, scope=...), and again if
# layers may have been created since.
PREPARATIONS = (
    "ctl.keras.layer_metrics:prepare",
    "ctl.keras.dropout:key_random_layers",
)
_SYNCHRONIZE = "ctl.layers.batch_norm:convert_sync_batch_norm"


def prepare(model: Any, seed: int, *, scope: str = "model") -> None:
    """Prepares the layers of a model for the steps that are traced later; may be called again.

    Args:
        model: a model of tf_keras, or the adapter of one of Keras 3.
        seed: the seed of the run.
        scope: the name of the model, which distinguishes the layers of several models.
    """
    replaced.apply()  # what belongs to Keras 3, if the model has imported it
    for row in PREPARATIONS:
        replaced.load(row)(model, seed, scope=scope)


def synchronize_batch_norm(model: Any) -> None:
    """Makes the plain batch normalizations of a model use the statistics of the global batch."""
    replaced.load(_SYNCHRONIZE)(model)
