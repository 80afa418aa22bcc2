"""Action, the base class of actions that use more than Orbit's protocol, and the list of a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import copy
import json
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.errors import UsageError

if TYPE_CHECKING:
    from ctl.evaluator import StandardEvaluator
    from ctl.loop.controller import Controller
    from ctl.loop.workdir import Workdir

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
        loops_end_at: steps at which an inner loop must end, the same in every process.
    """

    at = "eval"
    everywhere = False
    may_stop = True
    controller: "Controller" = None  # type: ignore[assignment]
    stop_reason = ""
    loops_end_at: tuple[int, ...] = ()
    # Whether `set_state` is called with {} if a checkpoint has no state of the action.
    _reads_missing_state = False

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "Action":
        """Makes an action that registry.py lists.

        Args:
            config: a validated config.
            workdir: the `Workdir` of the run.
        """
        return cls()

    def check(self, evaluator: "StandardEvaluator | None") -> None:
        """Checks that the action can work in this run; called before anything is written.

        Args:
            evaluator: the run's `StandardEvaluator`; None if it does not evaluate.

        Raises:
            UsageError: the action cannot work in this run; the message is one line.
        """

    def begin(self, controller: "Controller") -> None:
        """Prepares the action; called in every process before a checkpoint is restored.

            def begin(self, controller):
                super().begin(controller)
                self.file = open(controller.workdir.path / "losses.txt", "a")

        Args:
            controller: the `Controller` that calls the action.
        """
        self.controller = controller

    def __call__(self, outputs: Mapping[str, Any]) -> Any:
        """Handles the outputs of an inner loop or evaluation; does nothing by default.

        Args:
            outputs: loss and metrics by name, as Python numbers, the same in every process.
        """

    def around_training(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the run trains, saves and evaluates, in every process.

        def around_training(self):
            return my_tracker.start_run(name="digits")
        """
        return contextlib.nullcontext()

    def around(self, first: int, end: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which an inner loop runs the steps from `first` to `end`."""
        return contextlib.nullcontext()

    def request_stop(self, reason: str) -> None:
        """Ends training after the actions at this boundary; the run is complete then.

        Args:
            reason: the reason, as a clause.
        """
        self.stop_reason = self.stop_reason or reason

    def get_state(self) -> dict[str, Any]:
        """Returns the state to save in the next checkpoint, in JSON types; {} by default.

            def get_state(self):
                return {"best": self.best}

        The chief's state is saved. Variables need no state: make them attributes of the trainer.
        """
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from the state in a restored checkpoint; not called if the checkpoint has none.

        def set_state(self, state):
            self.best = state["best"]
        """

    def start(self) -> dict[str, Any]:
        """Returns entries to add to the event of a process that starts or resumes; {} by default."""
        return {}

    def end(self) -> None:
        """Called in every process when training has ended, but not when it was interrupted."""

    def result(self) -> dict[str, Any]:
        """Returns entries to add to `result.json`; {} by default.

        def result(self):
            return {"best": self.best}
        """
        return {}


class LoopAction(Action):
    """Base class of actions that observe the inner loops, and never stop the run."""

    at = "train"
    may_stop = False


class _CallableAction(Action):
    """Wraps a callable of the outputs as an `Action`."""

    everywhere = True
    may_stop = False

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def __call__(self, outputs: Mapping[str, Any]) -> Any:
        return self._function(outputs)


def as_action(
    action: Callable[[Any], Any], *, at: str | None = None, everywhere: bool | None = None
) -> Action:
    """Returns a callable as an `Action`, and a copy of an `Action` if it is called elsewhere.

        ctl.as_action(orbit.actions.NewBestMetric("accuracy"), at="eval")

    Args:
        action: an `Action`, or a callable of the outputs, such as Orbit's actions.
        at: "train" or "eval"; by default the action's own value, and "eval" for a callable.
        everywhere: whether all processes call it; by default the action's own value, and True for a
            callable, as in Orbit.
    """
    if not isinstance(action, Action):
        action = _CallableAction(action)
    chosen = {"at": at, "everywhere": everywhere}
    changes = {k: v for k, v in chosen.items() if v not in (None, getattr(action, k))}
    if changes:
        action = copy.copy(action)  # the caller's action keeps its own values
        vars(action).update(changes)
    return action


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

    def __init__(self, actions: Iterable[Callable[[Any], Any]], controller: "Controller"):
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
        # Inner loops may take milliseconds, so actions without a context of their own cost nothing.
        self._around = [
            action
            for action in self._actions.values()
            if getattr(action.around, "__func__", None) is not Action.around
        ]

    def __getitem__(self, name: str) -> Action:
        """Returns the first action of a class, by the name of the class."""
        return self._actions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._actions

    @property
    def loops_end_at(self) -> tuple[int, ...]:
        """The steps at which an inner loop must end."""
        return tuple(step for action in self._actions.values() for step in action.loops_end_at)

    def around(self, first: int, end: int) -> contextlib.AbstractContextManager[None]:
        """Enters the contexts of all actions around the steps of an inner loop, in order."""
        return _entered(action.around(first, end) for action in self._around)

    def around_training(self) -> contextlib.AbstractContextManager[None]:
        """Enters the contexts of all actions around the training of a process, in order."""
        return _entered(action.around_training() for action in self._actions.values())

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
        """Returns the notes for a checkpoint: the states of the actions, and the reason of a stop.

        Raises:
            UsageError: a state does not consist of JSON types.
        """
        states = {name: action.get_state() for name, action in self._actions.items()}
        for name, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"The state of the action {name} cannot be saved ({error}): let get_state return a "
                    "dict of texts, numbers, booleans, None, lists and dicts."
                ) from None
        notes = {
            "actions": {name: state for name, state in states.items() if state},
            "stopped": self.stop_reason,
        }
        return {name: value for name, value in notes.items() if value}

    def set_notes(self, notes: Mapping[str, Any]) -> None:
        """Passes each action its state from the notes of a restored checkpoint, if there is one."""
        states = notes.get("actions", {})
        for name, action in self._actions.items():  # in the same order in all processes
            if name in states or action._reads_missing_state:
                action.set_state(states.get(name, {}))

    def end(self) -> None:
        """Calls `end` of every action, in every process."""
        for action in self._actions.values():
            action.end()

    def start(self) -> dict[str, Any]:
        """Returns the entries of all actions for the event of a process that starts or resumes."""
        entries = (action.start() for action in self._actions.values())
        return {name: value for each in entries for name, value in each.items()}

    def results(self) -> dict[str, Any]:
        """Returns the entries of all actions for `result.json`."""
        results = (action.result() for action in self._actions.values())
        return {name: value for each in results for name, value in each.items()}


@contextlib.contextmanager
def _entered(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Enters contexts in order; each is made when the ones before it are entered."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def check_action(value: Any, evaluator: "StandardEvaluator | None") -> Action:
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
