"""What `ctl.keras.models` calls for objects of Keras 3. It does not import keras."""

import sys
from typing import Any

from ctl.errors import UsageError
from ctl.keras.keras3 import detection, private
from ctl.keras.keras3.detection import check
from ctl.keras.keras3.private import CallState, reset_names
from ctl.keras.keras3.private import value_of as raw
from ctl.keras.precision import Dtypes
from ctl.private import replaced

__all__ = [
    "CallState", "adapt", "check", "convert", "dtypes", "is_layer", "raw", "reset_names"
]  # fmt: skip


def adapt(value: Any) -> Any:
    """Returns the adapter of a layer or model, always the same one; other values as they are.

    Raises:
        UsageError: Keras 3 runs on another backend than TensorFlow, or a layer holds a metric or a
            tf.Variable.
    """
    # In functions, because TensorFlow imports Keras 3 by itself, and most trainers have no object of it.
    from ctl.keras.keras3 import conversion

    if not is_layer(value):
        # Further optimizers of a trainer, too.
        return conversion.optimizer_of(value)
    backend = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise UsageError(
            f"The backend of Keras 3 is {backend}, but ctl trains models of TensorFlow: set "
            "KERAS_BACKEND=tensorflow before keras is imported."
        )
    # Both import keras. `random` registers how its layers get their streams.
    from ctl.keras.keras3 import adapter, random  # noqa: F401

    replaced.apply()  # what belongs to Keras 3, which `build_model` may have imported
    adapter.prepare(value)
    return adapter.adapter_of(value)


def convert(value: Any) -> Any:
    """Returns an optimizer or metric as one of tf_keras; other values as they are."""
    from ctl.keras.keras3 import conversion

    return conversion.metric_of(conversion.optimizer_of(value))


def is_layer(value: Any) -> bool:
    """Returns whether an object of Keras 3 is a layer or model."""
    return detection.is_keras3(value, "Layer")


def dtypes() -> Dtypes | None:
    """Returns the functions of the global dtypes; None while keras is being imported."""
    config: Any = getattr(sys.modules.get("keras"), "config", None)
    if not hasattr(config, "set_dtype_policy"):
        return None
    return Dtypes(config.floatx, config.set_floatx, private.policy, private.set_policy)
