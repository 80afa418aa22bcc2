"""Sets the learning rate between calls of `ctl.Run.train`, and keeps it in a resumed run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.keras import precision
from ctl.loop.actions.action import LoopAction
from ctl.loop.loop_numbers import read_rate
from ctl.trainer import StandardTrainer

if TYPE_CHECKING:
    from ctl.loop.controller import Controller


class LearningRate(LoopAction):
    """Sets a constant learning rate; the checkpoints record it.

    A run that is resumed, by `ctl.Run` or by the program, continues with the rate of the checkpoint,
    unless the rate with which its optimizer is made has changed since.
    """

    everywhere = True
    _reads_missing_state = True

    def __init__(self) -> None:
        self._made: dict[str, float] = {}  # the constant rates of new optimizers, by place
        self._state: dict[str, Any] = {}

    def begin(self, controller: "Controller") -> None:
        """Reads the rates that the config or the trainer has set."""
        super().begin(controller)
        rates = _constant_rates(controller.trainer)
        self._made = {place: float(tf.convert_to_tensor(rate)) for place, rate in rates.items()}

    @property
    def value(self) -> float:
        """The learning rate of the next update."""
        return read_rate(self._optimizer)

    def set(self, value: float) -> None:
        """Sets the learning rate from the next update on.

        Raises:
            UsageError: the optimizer has a schedule.
        """
        if callable(self._optimizer._learning_rate):
            raise UsageError(
                "The learning rate is set by the optimizer's schedule: choose "
                "optimizer.schedule=constant to set it between calls."
            )
        self._optimizer.learning_rate = value
        self._state = {"learning_rate": value, "step": self.controller.step}

    def get_state(self) -> dict[str, Any]:
        """Returns the rates of new optimizers, and the rate of the trainer's optimizer if it was set."""
        changed = {"learning_rate": self.value} if self._state else {}
        return {"made": self._made, **self._state, **changed}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replaces a restored rate if a new optimizer has another one than when it was saved."""
        rates = _constant_rates(self.controller.trainer)
        own = next((k for k, v in rates.items() if v is self._optimizer._learning_rate), "")
        # A checkpoint of an older ctl has this entry at most, and only if the rate was set.
        earlier = state.get("made", {own: state.get("configured")})
        changed = {k for k in earlier if k in self._made and earlier[k] != self._made[k]}
        for place in changed:
            rates[place].assign(self._made[place])
        self._state = {}
        if "learning_rate" in state and own not in changed:
            self._state = {k: state[k] for k in ("learning_rate", "step")}
            self._optimizer.learning_rate = state["learning_rate"]
            self.controller.reporter.print_line(
                f"The learning rate is {state['learning_rate']:g}, as it was set at step "
                f"{state['step']}."
            )

    @property
    def _optimizer(self) -> precision.Optimizer:
        optimizer = self.controller.trainer.optimizer
        return precision.inner(optimizer)


def _constant_rates(trainer: StandardTrainer) -> dict[str, Any]:
    """Returns the learning rates, without a schedule, of all optimizers in a trainer's checkpoints.

    Returns:
        The attributes from the trainer to the rate -> its variable.
    """
    rates: dict[str, Any] = {}
    seen: set[int] = set()
    queue = [(name, None, item) for name, item in trainer.checkpoint_items().items()]
    for place, owner, thing in queue:  # it grows
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(owner, tf_keras.optimizers.Optimizer) and place.endswith("._learning_rate"):
            rates[place] = thing
        if not hasattr(thing, "assign"):
            children = tf.train.TrackableView.children(thing)
            queue += [(f"{place}.{name}", thing, child) for name, child in children.items()]
    return {place: rate for place, rate in rates.items() if hasattr(rate, "assign")}
