"""Makes the optimizer of a config, by its row of `CLASSES`."""

from typing import Any

import tf_keras

from ctl import errors
from ctl.errors import UsageError
from ctl.optimizers import CLASSES, MOMENTUM, arguments, schedules


def make(
    config: Any, *, global_batch_size: int, steps: int, jit: bool = True
) -> tf_keras.optimizers.Optimizer:
    """Makes a new optimizer; call it under the strategy's scope.

    Args:
        config: the section `optimizer` of a checked config.
        global_batch_size: the number of examples per update, which scales the learning rate.
        steps: the total number of updates, for a decay without `decay_steps`.
        jit: whether tf_keras may compile the update with XLA, as it does on GPUs by default.
    """
    values: dict[str, Any] = {"weight_decay": config.weight_decay or None, "jit_compile": jit}
    if config.name == "adamw":  # unlike the others, it does not accept None
        values["weight_decay"] = config.weight_decay
    if config.name in MOMENTUM:
        values["momentum"] = config.momentum
    if config.name not in CLASSES:  # it need not have arguments that the config does not set
        keys = ("momentum", "weight_decay")
        values = {key: config[key] for key in keys if config[key]}
    function = arguments.load("optimizer.name", CLASSES.get(config.name, config.name))
    given = config.arguments.to_dict()
    names = {**{name: f"optimizer.{name}" for name in values}, "learning_rate": ""}
    arguments.check(function, given, reserved=names, key="optimizer.arguments")
    schedule = schedules.make(config, learning_rate(config, global_batch_size), steps)
    optimizer = arguments.call("optimizer", function, learning_rate=schedule, **values, **given)
    return _check_type(config.name, optimizer)


def learning_rate(config: Any, global_batch_size: int) -> float:
    """Returns the peak learning rate, scaled linearly with the batch size if the config requires it.

    Scaling follows Goyal et al. 2017, "Accurate, large minibatch SGD".
    """
    base = config.learning_rate_batch_size
    return config.learning_rate * (global_batch_size / base if base else 1.0)


def _check_type(name: str, optimizer: Any) -> tf_keras.optimizers.Optimizer:
    if not isinstance(optimizer, tf_keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer.name is {name!r}, which returned {errors.type_name(optimizer)}: return a "
            "tf_keras.optimizers.Optimizer."
        )
    return optimizer
