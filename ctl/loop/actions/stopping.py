"""Ends training when a metric of the evaluation stops improving or is reached, or after a time limit."""

from collections.abc import Mapping
import time
from typing import TYPE_CHECKING, Any

from ctl.configs import durations
from ctl.errors import UsageError
from ctl.loop.actions.action import Action
from ctl.loop.actions.monitored_metric import MetricAction
from ctl.loop.progress import format_numbers

if TYPE_CHECKING:
    from ctl.loop.workdir import Workdir

_STATE = ("best", "best_step", "count", "step")  # attributes of `EarlyStopping` in a checkpoint


class EarlyStopping(MetricAction):
    """Requests a stop after a number of evaluations in a row without an improvement.

        EarlyStopping("eval/loss", "min", patience=3)

    Like the Keras callback of the same name, but it counts evaluations, and checkpoints hold its state:
    a run that is killed and resumed ends at the same step. A NaN is no improvement.

    Args:
        metric: the name of the metric, such as "eval/accuracy".
        mode: "max" if higher values are better, "min" if lower ones are.
        patience: the number of evaluations in a row without an improvement.
        min_delta: a larger change than this is an improvement.

    Raises:
        UsageError: an argument has a value that is not allowed.
    """

    def __init__(self, metric: str, mode: str, *, patience: int = 3, min_delta: float = 0.0):
        if patience < 1 or not 0 <= min_delta < float("inf"):
            raise UsageError(
                f"early_stopping: patience={patience} and min_delta={min_delta}, but they must be at "
                "least 1 and at least 0."
            )
        super().__init__(metric, mode)
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._best_step = 0
        self._count = 0  # evaluations since the best one
        self._step = -1  # the step of the last evaluation that was counted

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "EarlyStopping":
        """Makes the action of a config; see registry.py."""
        best = config.train.best
        return cls(best.metric, best.mode, patience=best.patience)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Counts an evaluation."""
        value, step = self._metric.read(outputs), self.controller.step
        # A resumed run may repeat an evaluation that its checkpoint has counted already.
        if step > self._step:
            self._step = step
            self._count += 1
            if self._metric.is_better(value, self._best, min_delta=self._min_delta):
                self._best, self._best_step, self._count = value, step, 0
        if self._count >= self._patience:
            self._end_patience()

    def get_state(self) -> dict[str, Any]:
        """Returns the best value and the count since."""
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the best value and the count."""
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    def _end_patience(self) -> None:
        self.request_stop(self._describe(self._count))

    def _describe(self, count: int) -> str:
        shown = "" if self._best is None else format_numbers({" over": self._best})
        best = f"{shown} at step {self._best_step}" if shown else ", which was never a number,"
        evaluations = f"{count} evaluation{'s' * (count > 1)}"
        return f"{self._metric.name} has not improved{best} for {evaluations}"


class StopAtTarget(MetricAction):
    """Requests a stop after an evaluation that reaches `train.best.target`.

        StopAtTarget("eval/accuracy", "max", target=0.93)

    Args:
        metric: the name of the metric, such as "eval/accuracy".
        mode: "max" if higher values are better, "min" if lower ones are.
        target: a value as good as this one ends the training.
    """

    def __init__(self, metric: str, mode: str, *, target: float):
        super().__init__(metric, mode)
        self._target = target

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "StopAtTarget":
        """Makes the action of a config; see registry.py."""
        best = config.train.best
        return cls(best.metric, best.mode, target=best.target)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Compares the value of an evaluation."""
        value = self._metric.read(outputs)
        if self._metric.sign * value >= self._metric.sign * self._target:
            self.request_stop(f"{self._metric.name} has reached {self._target:g}")


class TimeLimit(Action):
    """Requests a stop when a run has taken as long as `train.max_duration`.

        TimeLimit("8 hours")

    The time includes evaluations, checkpoints, and earlier processes of the run up to their last
    checkpoint. It is checked after each inner loop, by the clock of the chief.

    Args:
        duration: the limit, such as "8 hours" or "30 minutes".

    Raises:
        UsageError: `duration` is not a time.
    """

    at = "train"

    def __init__(self, duration: str):
        self._duration = duration
        self._limit = durations.seconds(duration)
        self._since = time.monotonic()

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "TimeLimit":
        """Makes the action of a config; see registry.py."""
        return cls(config.train.max_duration)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Checks the clock."""
        if self.get_state()["seconds"] >= self._limit:
            self.request_stop(f"{durations.LIMIT}={self._duration} has passed")

    def get_state(self) -> dict[str, Any]:
        """Returns the seconds so far."""
        return {"seconds": time.monotonic() - self._since}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Adds the time of the earlier processes."""
        # The time never decreases: a rollback within a process restores an old checkpoint, but no time.
        self._since = min(self._since, time.monotonic() - state["seconds"])
