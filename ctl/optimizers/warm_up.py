"""Schedules that tf_keras does not have: linear warm-up before any schedule, inverse sqrt, plateau."""

from typing import Any

import tensorflow as tf
import tf_keras


@tf_keras.saving.register_keras_serializable("ctl")
class WarmUp(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Raises the rate linearly from 0, then follows another schedule (Goyal et al. 2017).

    Args:
        rate: the rate at the end of the warm-up.
        warmup_steps: the number of updates of the warm-up.
        after: a schedule, whose first update is the first one after the warm-up; or a float.
    """

    def __init__(self, rate: float, warmup_steps: int, after: Any):
        self.rate = rate
        self.warmup_steps = warmup_steps
        self.after = after

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of an update, counted from 0."""
        with tf.name_scope("WarmUp"):
            rate = tf.convert_to_tensor(self.rate)
            count = tf.cast(self.warmup_steps, rate.dtype)
            step = tf.convert_to_tensor(step)
            # Both branches are computed: the later one must not see a negative step, for which
            # an exponential decay would be infinite.
            following = tf.maximum(step - tf.cast(self.warmup_steps, step.dtype), 0)
            after = self.after(following) if callable(self.after) else self.after
            warm = rate * (tf.cast(step, rate.dtype) / count)
            return tf.where(step < tf.cast(self.warmup_steps, step.dtype), warm, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"rate": self.rate, "warmup_steps": self.warmup_steps, "after": self.after}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Makes the schedule of a config, in which a schedule `after` may be a config, too."""
        return cls(**config | {"after": tf_keras.saving.deserialize_keras_object(config["after"])})


@tf_keras.saving.register_keras_serializable("ctl")
class InverseSqrt(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Decays by 1 / sqrt(1 + step / scale).

    After a warm-up of `scale` updates this is the schedule of Vaswani et al. 2017, "Attention is all
    you need": proportional to 1 / sqrt(update).

    Args:
        rate: the rate of the first update.
        scale: the update at which the rate is 1 / sqrt(2) of `rate`.
    """

    def __init__(self, rate: float, scale: int):
        self.rate = rate
        self.scale = scale

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of an update, counted from 0."""
        rate = tf.convert_to_tensor(self.rate)
        return rate * tf.math.rsqrt(1 + tf.cast(step, rate.dtype) / self.scale)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"rate": self.rate, "scale": self.scale}


@tf_keras.saving.register_keras_serializable("ctl")
class Plateau(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies the rate by a factor that an action sets; make it in the strategy's scope.

    Args:
        rate: the first rate.

    Attributes:
        factor: scalar variable, 1 at first. The state of the action is in the checkpoints.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self.factor = tf.Variable(1.0, trainable=False, name="plateau")

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of an update."""
        return tf.convert_to_tensor(self.rate) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"rate": self.rate}
