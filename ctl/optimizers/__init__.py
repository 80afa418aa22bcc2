"""Makes a tf_keras optimizer and its learning rate schedule from the config.

A new optimizer is a row of `CLASSES`; a new schedule is a row of `schedules.KINDS`. A config names
other functions by `package.module:function`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.errors import UsageError
from ctl.optimizers import arguments, schedules

if TYPE_CHECKING:
    import tf_keras

CLASSES = {  # optimizer.name -> module:class
    "adam": "tf_keras.optimizers:Adam",
    "adamw": "tf_keras.optimizers:AdamW",
    "sgd": "tf_keras.optimizers:SGD",
    "rmsprop": "tf_keras.optimizers:RMSprop",
    "adagrad": "tf_keras.optimizers:Adagrad",
    "lion": "tf_keras.optimizers:Lion",
    "adamax": "tf_keras.optimizers:Adamax",
    "adafactor": "tf_keras.optimizers:Adafactor",
    "adadelta": "tf_keras.optimizers:Adadelta",
    "ftrl": "tf_keras.optimizers:Ftrl",
    "lamb": "ctl.optimizers.layerwise:LAMB",
    "lars": "ctl.optimizers.layerwise:LARS",
}
MOMENTUM = ("sgd", "rmsprop", "lars")  # the optimizers with the argument `momentum`
LAYERWISE = ("lamb", "lars")  # they do not scale updates of variables without weight decay
# They update each element from that element's gradient and slots alone.
ELEMENTWISE = (
    "adam", "adamw", "sgd", "rmsprop", "adagrad", "lion", "adamax", "adadelta", "ftrl",
)  # fmt: skip


class FromConfig:
    """Makes the optimizer of an experiment's config, once the length of the data is known.

    Args:
        resolve: examples_per_epoch -> the config, with all durations as numbers of steps.

    Attributes:
        examples_per_epoch: the number of training examples; the trainer sets it before the call.
        called: whether an optimizer was made. A trainer may make its own one instead.
    """

    def __init__(self, resolve: Callable[[int | None], Any]):
        self.examples_per_epoch: int | None = None
        self.called = False
        self._resolve = resolve

    def __call__(self) -> "tf_keras.optimizers.Optimizer":
        """Makes a new optimizer; call it under the strategy's scope."""
        self.called = True
        config = self._resolve(self.examples_per_epoch)
        return self._make(config, config.optimizer)

    def make_group(self, index: int) -> "tf_keras.optimizers.Optimizer":
        """Makes the optimizer of a group of `optimizer.groups`, by its number."""
        config = self._resolve(self.examples_per_epoch)
        return self._make(config, type(config)(config.optimizer.groups[index]["optimizer"]))

    def _make(self, config: Any, section: Any) -> "tf_keras.optimizers.Optimizer":
        return make(
            section,
            global_batch_size=config.data.global_batch_size,
            steps=config.train.steps,
            jit=config.runtime.xla != "off",
        )


def make(
    config: Any, *, global_batch_size: int, steps: int, jit: bool = True
) -> "tf_keras.optimizers.Optimizer":
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


def _check_type(name: str, optimizer: Any) -> "tf_keras.optimizers.Optimizer":
    import tf_keras

    if not isinstance(optimizer, tf_keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer.name is {name!r}, which returned {errors.type_name(optimizer)}: return a "
            "tf_keras.optimizers.Optimizer."
        )
    return optimizer
