"""Sets the learning rate between calls of `ctl.Run.train`, and keeps it in a resumed run."""

from collections.abc import Mapping
from typing import Any

from ctl.errors import UsageError
from ctl.loop import reporter
from ctl.loop.actions.action import Action
from ctl.replica.arithmetic import precision


class LearningRate(Action):
    """Sets a constant learning rate; the checkpoints record it.

    A run that is resumed, by `ctl.Run` or by the program, continues with this rate, unless the rate in
    the config has changed since.
    """

    at = "train"
    everywhere = True
    may_stop = False

    def __init__(self) -> None:
        self._configured: float | None = None
        self._state: dict[str, Any] = {}

    def begin(self, controller: Any) -> None:
        """Reads the rate that the config or the trainer has set."""
        super().begin(controller)
        self._configured = None if self._has_schedule else self.value

    @property
    def value(self) -> float:
        """The learning rate of the next update."""
        return reporter.read_rate(self._optimizer)

    def set(self, value: float) -> None:
        """Sets the learning rate from the next update on.

        Raises:
            UsageError: the optimizer has a schedule.
        """
        if self._has_schedule:
            raise UsageError(
                "The learning rate is set by the optimizer's schedule: choose "
                "optimizer.schedule=constant to set it between calls."
            )
        self._optimizer.learning_rate = value
        step = self.controller.step
        self._state = {"learning_rate": value, "configured": self._configured, "step": step}

    def get_state(self) -> dict[str, Any]:
        """Returns the rate if it was set."""
        return self._state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Sets the rate again, unless the config has changed."""
        if state["configured"] != self._configured:
            return
        self._state = dict(state)
        self._optimizer.learning_rate = state["learning_rate"]
        self.controller.reporter.print_line(
            f"The learning rate is {state['learning_rate']:g}, as it was set at step {state['step']}."
        )

    @property
    def _has_schedule(self) -> bool:
        return callable(self._optimizer._learning_rate)

    @property
    def _optimizer(self) -> Any:
        optimizer = self.controller.trainer.optimizer
        return optimizer.inner_optimizer if precision.has_loss_scale(optimizer) else optimizer
