"""Optimizers and metrics of Keras 3 as those of tf_keras, with the same arguments.

Keras 3's optimizers always sum the gradients over the replicas, which ctl has summed already, and its
metrics keep a part of their sums on each replica without adding them up.
"""

from typing import Any

import tf_keras

from ctl.errors import UsageError
from ctl.replica.keras3 import detection

# Arguments of Keras 3's optimizers that tf_keras does not have -> the options of ctl.
_OPTIONS = {
    "loss_scale_factor": "train.loss_scale",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
}


def optimizer_of(optimizer: Any) -> Any:
    """Returns the tf_keras optimizer with the arguments of one of Keras 3; others as they are.

    Raises:
        UsageError: tf_keras has no such optimizer or argument.
    """
    if not detection.is_keras3(optimizer, "Optimizer"):
        return optimizer
    config = optimizer.get_config()
    for name, option in _OPTIONS.items():
        if config.pop(name, None) is not None:
            raise UsageError(
                f"The optimizer of Keras 3 has {name}, which would act on each replica: set {option} "
                "instead."
            )
    if optimizer.built:
        raise UsageError(
            "The optimizer of Keras 3 is built, and its slot variables cannot be used: make a new one."
        )
    rate = config.get("learning_rate")
    if isinstance(rate, dict):
        schedules = tf_keras.optimizers.schedules
        config["learning_rate"] = _make(
            optimizer._learning_rate, schedules, "schedules", rate["config"]
        )
    return _make(optimizer, tf_keras.optimizers, "optimizers", config)


def metric_of(metric: Any) -> Any:
    """Returns the tf_keras metric with the arguments of one of Keras 3; others as they are.

    Raises:
        UsageError: tf_keras has no such metric.
    """
    if not detection.is_keras3(metric, "Metric"):
        return metric
    return _make(metric, tf_keras.metrics, "metrics", metric.get_config())


def _make(value: Any, package: Any, kind: str, config: dict[str, Any]) -> Any:
    name = type(value).__name__
    reason = "its class is not Keras' own"
    if type(value).__module__.startswith("keras.src."):
        try:
            return getattr(package, name).from_config(config)
        except (AttributeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
    raise UsageError(
        f"{name} of keras.{kind} cannot be converted to tf_keras ({reason}): write one of "
        f"{package.__name__.replace('.api._v2.keras', '').replace('.api._v1.keras', '')} instead."
    )
