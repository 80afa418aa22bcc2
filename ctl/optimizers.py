"""config.optimizer -> a tf_keras optimizer."""

from collections.abc import Callable
from typing import Any

import tf_keras

_CLASSES = {
    "adagrad": tf_keras.optimizers.Adagrad,
    "adam": tf_keras.optimizers.Adam,
    "adamw": tf_keras.optimizers.AdamW,
    "lion": tf_keras.optimizers.Lion,
    "rmsprop": tf_keras.optimizers.RMSprop,
    "sgd": tf_keras.optimizers.SGD,
}


def factory(
    config: Any, *, global_batch_size: int, steps: int, jit: bool = True
) -> Callable[[], tf_keras.optimizers.Optimizer]:
    """Returns what makes the optimizer, to be called under the strategy's scope.

    Args:
        config: the `optimizer` section of a checked config.
        global_batch_size: examples an update, for the linear scaling of the learning rate.
        steps: updates that a cosine schedule is spread over, unless the section says.
        jit: whether tf_keras may compile the update by XLA, as it does on GPUs.
    """
    rate = learning_rate(config, global_batch_size)
    options: dict[str, Any] = {"weight_decay": config.weight_decay or None, "jit_compile": jit}
    if config.name == "adamw":  # which wants a number
        options["weight_decay"] = config.weight_decay
    if config.name in ("sgd", "rmsprop"):
        options["momentum"] = config.momentum
    if config.name == "sgd":
        options["nesterov"] = config.nesterov
    return lambda: _CLASSES[config.name](learning_rate=_schedule(config, rate, steps), **options)


def learning_rate(config: Any, global_batch_size: int) -> float:
    """The peak learning rate, scaled to the batch where the section asks for it."""
    base = config.learning_rate_batch_size
    return config.learning_rate * (global_batch_size / base if base else 1.0)


def _schedule(config: Any, rate: float, steps: int) -> Any:
    if config.schedule == "constant":
        return rate
    decay_steps = config.decay_steps or steps - config.warmup_steps
    if not config.warmup_steps:
        return tf_keras.optimizers.schedules.CosineDecay(rate, decay_steps)
    return tf_keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps, warmup_target=rate, warmup_steps=config.warmup_steps
    )
