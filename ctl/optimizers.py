"""Makes a tf_keras optimizer and its learning rate schedule from the config.

A new optimizer is an entry of `CLASSES`. Importing this module does not import TensorFlow, so that a
config can be validated without it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tf_keras

CLASSES = {  # optimizer.name -> the name of the class in tf_keras.optimizers
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "lion": "Lion",
}


def factory(
    config: Any, *, global_batch_size: int, steps: int, jit: bool = True
) -> "Callable[[], tf_keras.optimizers.Optimizer]":
    """Returns a function that makes a new optimizer; call it under the strategy's scope.

    Args:
        config: the section `optimizer` of a checked config.
        global_batch_size: the number of examples per update, which scales the learning rate.
        steps: the total number of updates, for a cosine decay without `decay_steps`.
        jit: whether tf_keras may compile the update with XLA, as it does on GPUs by default.
    """
    rate = learning_rate(config, global_batch_size)
    options: dict[str, Any] = {"weight_decay": config.weight_decay or None, "jit_compile": jit}
    if config.name == "adamw":  # unlike the others, it does not accept None
        options["weight_decay"] = config.weight_decay
    if config.name in ("sgd", "rmsprop"):
        options["momentum"] = config.momentum
    if config.name == "sgd":
        options["nesterov"] = config.nesterov

    def make() -> "tf_keras.optimizers.Optimizer":
        import tf_keras

        optimizer = getattr(tf_keras.optimizers, CLASSES[config.name])
        return optimizer(learning_rate=_schedule(config, rate, steps), **options)

    return make


def learning_rate(config: Any, global_batch_size: int) -> float:
    """Returns the peak learning rate, scaled linearly with the batch size if the config requires it.

    Scaling follows Goyal et al. 2017, "Accurate, large minibatch SGD".
    """
    base = config.learning_rate_batch_size
    return config.learning_rate * (global_batch_size / base if base else 1.0)


def _schedule(config: Any, rate: float, steps: int) -> Any:
    import tf_keras

    if config.schedule == "constant":
        return rate
    decay_steps = config.decay_steps or steps - config.warmup_steps
    if not config.warmup_steps:
        return tf_keras.optimizers.schedules.CosineDecay(rate, decay_steps)
    return tf_keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps, warmup_target=rate, warmup_steps=config.warmup_steps
    )
