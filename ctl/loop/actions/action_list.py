"""Calls the actions of a run in order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ctl import errors
from ctl.errors import UsageError
from ctl.loop.actions.action import BOUNDARIES, Action, as_action


class ActionList:
    """Calls actions in order, and collects their states and results.

        actions = ActionList([EarlyStopping(...), my_action], controller)
        actions.run("eval", {"accuracy": 0.9})
        actions.stop_reason             # None, or {"step": 500, "reason": "..."}

    Args:
        actions: `Action`s, or callables of the outputs; the constructor calls their `begin`.
        controller: the `Controller` that calls them.

    Attributes:
        stop_reason: the step at which an action ended training, and why; None if none did.

    Raises:
        UsageError: one of them is not an action, or cannot work in this run.
    """

    def __init__(self, actions: Iterable[Callable[[Any], Any]], controller: Any):
        self.stop_reason: dict[str, Any] | None = None
        self._controller = controller
        self._actions: dict[str, Action] = {}
        for value in actions:
            action = check_action(value, controller.evaluator)
            name = type(action).__name__
            # The state of a second action of a class must not replace the state of the first.
            count = sum(key.partition(":")[0] == name for key in self._actions)
            self._actions[f"{name}:{count}" if count else name] = action
            action.begin(controller)

    def has(self, at: str) -> bool:
        """Returns whether there is an action at a boundary."""
        return any(action.at == at for action in self._actions.values())

    def run(self, at: str, outputs: Mapping[str, Any]) -> None:
        """Calls the actions at a boundary; collective if one of them may stop the run.

        Args:
            at: "train" or "eval".
            outputs: the outputs of the loop or the evaluation, as numbers.
        """
        controller = self._controller
        actions = [action for action in self._actions.values() if action.at == at]
        for action in actions:
            if action.everywhere or controller.is_chief:
                action(outputs)
        # All processes agree which actions may stop the run, but not whether they do. Only the first
        # stop counts: `ctl.Run` may evaluate again after it.
        if not self.stop_reason and any(action.may_stop for action in actions):
            reasons = [action.stop_reason for action in actions if action.stop_reason]
            if controller.processes.any_process(bool(reasons)):
                reason = reasons[0] if reasons else "an action of another process requested it"
                self.stop_reason = {"step": controller.step, "reason": reason}
                controller.reporter.record("stop_requested", controller.step, reason=reason)
                line = f"Training ends at step {controller.step}: {reason}."
                controller.reporter.print_line(line)

    def get_notes(self) -> dict[str, Any]:
        """Returns the notes for a checkpoint: the states of the actions, or {} if there are none."""
        states = self.get_state()
        return {"actions": states} if states else {}

    def set_notes(self, notes: Mapping[str, Any]) -> None:
        """Passes each action its state from the notes of a restored checkpoint."""
        self.set_state(notes.get("actions", {}))

    def get_state(self) -> dict[str, Any]:
        """Returns the states of the actions that have one, by name."""
        states = {name: action.get_state() for name, action in self._actions.items()}
        return {name: state for name, state in states.items() if state}

    def set_state(self, states: Mapping[str, Any]) -> None:
        """Passes each action its saved state, if there is one."""
        for name, action in self._actions.items():
            if name in states:
                action.set_state(states[name])

    def end(self) -> None:
        """Calls `end` of every action, in every process."""
        for action in self._actions.values():
            action.end()

    def results(self) -> dict[str, Any]:
        """Returns the entries of all actions for `result.json`."""
        results: dict[str, Any] = {}
        for action in self._actions.values():
            results |= action.result()
        return results


def check_action(value: Any, evaluator: Any) -> Action:
    """Returns an action or a callable as an `Action`.

    Raises:
        UsageError: it is neither, or it cannot work with this evaluator.
    """
    if not callable(value) or isinstance(value, type):
        shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise UsageError(
            f"An action is {shown}, but must be an instance that can be called with the outputs."
        )
    action = as_action(value)
    if action.at not in BOUNDARIES:
        hint = errors.did_you_mean(str(action.at), BOUNDARIES)
        raise UsageError(f"The action {type(value).__name__} has at={action.at!r}{hint}")
    action.check(evaluator)
    return action
