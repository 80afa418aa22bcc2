"""Optimizers and metrics of Keras 3 as those of tf_keras, with the same arguments.

Keras 3's optimizers always sum the gradients over the replicas, which ctl has summed already, and its
metrics keep a part of their sums on each replica without adding them up.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.keras.keras3 import detection, private
from ctl.keras.precision import Optimizer
from ctl.private import classes

# Arguments of Keras 3's optimizers that tf_keras does not have -> the options of ctl.
_OPTIONS = {
    "loss_scale_factor": "runtime.loss_scale",
    "gradient_accumulation_steps": "optimizer.micro_batches",
}


def optimizer_of(optimizer: Optimizer) -> Any:
    """Returns the tf_keras optimizer with the arguments of one of Keras 3; others as they are.

    Raises:
        UsageError: tf_keras has no such optimizer or argument.
    """
    if not detection.is_keras3(optimizer, "Optimizer"):
        return optimizer
    if "_ctl_converted" not in vars(optimizer):
        converted = _convert(optimizer)
        object.__setattr__(converted, "_ctl_of", optimizer)  # without TensorFlow's tracking
        object.__setattr__(optimizer, "_ctl_converted", converted)
        # The user's object shows and sets what is trained with.
        classes.extend(optimizer, _Following)
    return vars(optimizer)["_ctl_converted"]


class _Following:
    """An optimizer of Keras 3 whose rate and count are those of the tf_keras optimizer."""

    @property
    def learning_rate(self) -> Any:
        return self._ctl_source.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        if "_ctl_converted" in vars(self):
            self._ctl_source.learning_rate = _schedule_of(rate)
        else:
            of_keras: Any = super(_Following, type(self))
            of_keras.learning_rate.fset(self, rate)

    @property
    def iterations(self) -> Any:
        return self._ctl_source.iterations

    @property
    def _ctl_source(self) -> Any:
        # A copy, or an object that was made from the config, was not converted.
        return vars(self).get("_ctl_converted", super())


def _schedule_of(rate: Any) -> Any:
    schedules = tf_keras.optimizers.schedules
    is_schedule = detection.is_keras3(rate, "LearningRateSchedule")
    return _make(rate, schedules, _config(rate, schedules)) if is_schedule else rate


def _convert(optimizer: Optimizer) -> Any:
    config = _config(optimizer, tf_keras.optimizers)
    for name, option in _OPTIONS.items():
        if config.pop(name, None) is not None:
            raise UsageError(
                f"The optimizer of Keras 3 has {name}, which would act on each replica: set {option} "
                "instead."
            )
    if private.excludes_from_weight_decay(optimizer):
        raise UsageError(
            "The optimizer of Keras 3 excludes variables from weight decay, which is in no config: call "
            "exclude_from_weight_decay of a tf_keras optimizer, or set optimizer.weight_decay_exclude."
        )
    if optimizer.built:
        raise UsageError(
            "The optimizer of Keras 3 is built, and its slot variables cannot be used: make a new one."
        )
    if isinstance(config.get("learning_rate"), dict):
        config["learning_rate"] = _schedule_of(private.learning_rate_of(optimizer))
    return _make(optimizer, tf_keras.optimizers, config)


def metric_of(metric: Any) -> Any:
    """Returns the tf_keras metric with the arguments of one of Keras 3; others as they are.

    Raises:
        UsageError: tf_keras has no such metric.
    """
    if not detection.is_keras3(metric, "Metric"):
        return metric
    config = _config(metric, tf_keras.metrics)
    # The metrics of Keras 3 that count have an integer dtype, in which tf_keras would compute, too.
    if tf.as_dtype(config.get("dtype") or "float32").is_integer:
        del config["dtype"]
    return _make(metric, tf_keras.metrics, config)


def _config(value: Any, package: Any) -> dict[str, Any]:
    with _report(value, package):
        if not type(value).__module__.startswith("keras.src."):
            raise ValueError("its class is not Keras' own")
        config: dict[str, Any] = value.get_config()
    return config


def _make(value: Any, package: Any, config: dict[str, Any]) -> Any:
    with _report(value, package):
        return getattr(package, type(value).__name__).from_config(config)


@contextlib.contextmanager
def _report(value: Any, package: Any) -> Iterator[None]:
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        name = package.__name__.rpartition("keras.")[2]
        raise UsageError(
            f"{type(value).__name__} of keras.{name} cannot be converted to tf_keras "
            f"({str(error).splitlines()[0]}): write one of tf_keras.{name} instead."
        ) from error
