"""Action: the base class of actions that use more than Orbit's protocol."""

from collections.abc import Callable, Mapping
from typing import Any

BOUNDARIES = ("train", "eval")


class Action:
    """Base class of objects that are called with the outputs of each inner loop or evaluation.

        class StopAtZero(ctl.Action):
            at = "train"

            def __call__(self, outputs):
                if outputs["loss"] == 0:
                    self.request_stop("the loss is 0")

    Orbit's protocol is a callable of the outputs, and any such callable is an action, too: see
    `as_action`. Everything beyond `__call__` is optional. `self.controller` is the run, with its
    `trainer`, `evaluator`, `step`, `workdir`, `is_chief`, `processes` and `reporter`. A summary writer
    is active and knows the step: call `tf.summary.scalar(name, value)`.

    Attributes:
        at: "train" to be called after each inner loop, "eval" after each evaluation.
        everywhere: whether all processes of a run call it, or the chief only. Reading or saving
            variables may be a collective operation, which requires all processes.
        may_stop: whether it may call `request_stop`; if not, a run of several processes need not
            communicate after it.
        controller: the controller, from `begin` on.
        stop_reason: the reason that was passed to `request_stop`; "" before.
    """

    at = "eval"
    everywhere = False
    may_stop = True
    controller: Any = None
    stop_reason = ""

    def check(self, evaluator: Any) -> None:
        """Checks that the action can work in this run; called before anything is written.

        Args:
            evaluator: the run's `StandardEvaluator`; None if it does not evaluate.

        Raises:
            UsageError: the action cannot work in this run; the message is one line.
        """

    def begin(self, controller: Any) -> None:
        """Prepares the action; called in every process before a checkpoint is restored.

        Args:
            controller: the `Controller` that calls the action.
        """
        self.controller = controller

    def __call__(self, outputs: Mapping[str, Any]) -> Any:
        """Handles the outputs of an inner loop or evaluation.

        Args:
            outputs: loss and metrics by name, as Python numbers, the same in every process.
        """
        raise NotImplementedError

    def request_stop(self, reason: str) -> None:
        """Ends training after the actions at this boundary; the run is complete then.

        Args:
            reason: the reason, as a clause.
        """
        self.stop_reason = self.stop_reason or reason

    def get_state(self) -> dict[str, Any]:
        """Returns the state to save in the next checkpoint, in JSON types; {} by default.

        The chief's state is saved. Variables need no state: make them attributes of the trainer.
        """
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from the state in a restored checkpoint; not called if the checkpoint has none."""

    def end(self) -> None:
        """Called in every process when training has ended, but not when it was interrupted."""

    def result(self) -> dict[str, Any]:
        """Returns entries to add to `result.json`; {} by default."""
        return {}


class _CallableAction(Action):
    """Wraps a callable of the outputs as an `Action`."""

    may_stop = False

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def __call__(self, outputs: Mapping[str, Any]) -> Any:
        return self._function(outputs)


def as_action(
    action: Callable[[Any], Any], *, at: str | None = None, everywhere: bool | None = None
) -> Action:
    """Converts a callable to an `Action`, and sets where it is called.

        ctl.as_action(orbit.actions.NewBestMetric("accuracy"), at="eval")

    Args:
        action: an `Action`, or a callable of the outputs, such as Orbit's actions.
        at: "train" or "eval"; by default the action's own value, and "eval" for a callable.
        everywhere: whether all processes call it; by default the action's own value, and True for a
            callable, as in Orbit.
    """
    if not isinstance(action, Action):
        action = _CallableAction(action)
        action.everywhere = True
    if at is not None:
        action.at = at
    if everywhere is not None:
        action.everywhere = everywhere
    return action
