"""Makes a tf_keras optimizer and its learning rate schedule from the config.

A new optimizer is a row of `CLASSES`; a new schedule is a row of `schedules.KINDS`. A config names
other functions by `package.module:function`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tf_keras

_OF_KERAS = (
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Lion", "Adamax", "Adafactor", "Adadelta", "Ftrl",
)  # fmt: skip
# optimizer.name -> module:class
CLASSES = {name.lower(): f"tf_keras.optimizers:{name}" for name in _OF_KERAS}
CLASSES |= {name.lower(): f"ctl.optimizers.layerwise:{name}" for name in ("LAMB", "LARS")}
CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")  # bounds of tf_keras' optimizers
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
        from ctl.optimizers.making import make  # a trainer may make its optimizer itself

        return make(
            section,
            global_batch_size=config.data.global_batch_size,
            steps=config.train.steps,
            jit=config.runtime.xla != "off",
        )
