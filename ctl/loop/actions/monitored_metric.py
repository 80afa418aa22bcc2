"""Reads and compares the metric of an evaluation that an action depends on."""

from collections.abc import Mapping
import math
from typing import TYPE_CHECKING, Any

from ctl import errors
from ctl.errors import UsageError
from ctl.loop.actions.action import Action

if TYPE_CHECKING:
    from ctl.evaluator import StandardEvaluator

PREFIX = "eval/"


class MonitoredMetric:
    """Reads one value of an evaluation's outputs, and compares two of them.

        metric = MonitoredMetric("eval/accuracy", "max")
        metric.is_better(metric.read({"accuracy": 0.9}), 0.8)      # True

    Args:
        name: the name, such as "eval/accuracy"; "eval/a/b" is the value "b" of the nested outputs "a",
            such as of the split "a" if several are evaluated.
        mode: "max" if higher values are better, "min" if lower ones are.

    Attributes:
        sign: 1 if higher values are better, -1 if lower ones are.

    Raises:
        UsageError: an argument has a value that is not allowed.
    """

    def __init__(self, name: str, mode: str):
        if not name.startswith(PREFIX) or name == PREFIX:
            raise UsageError(f"The metric is {name!r}, but must be {PREFIX}NAME, as {PREFIX}loss.")
        if mode not in ("min", "max"):
            raise UsageError(
                f"The mode of {name} is {mode!r}{errors.did_you_mean(mode, ['min', 'max'])}"
            )
        self.name = name
        self.mode = mode
        self.sign = 1 if mode == "max" else -1

    def check(self, evaluator: "StandardEvaluator | None") -> None:
        """Raises UsageError if an evaluator is known not to have the metric."""
        if evaluator is None:
            raise UsageError(
                f"{self.name} requires evaluations: use --mode=train_and_eval, or remove the metric."
            )
        first, _, rest = self.name.removeprefix(PREFIX).partition("/")
        if len(evaluator.splits) > 1:
            if first not in evaluator.splits or not rest:
                split, metric = evaluator.splits[0], rest or first
                raise UsageError(
                    f"The evaluation has no metric {self.name}: eval.splits has several splits, so "
                    f"name one, as in {PREFIX}{split}/{metric}."
                )
            first = rest.partition("/")[0]
        # An evaluator or metric of the user may return anything: the first evaluation decides.
        if evaluator.has_known_names:
            names = {"loss": None, **dict.fromkeys(evaluator.metrics), "examples": None}
            self._check_name(first, names)

    def read(self, outputs: Mapping[str, Any]) -> float:
        """Returns the value in an evaluation's outputs.

        Raises:
            UsageError: there is no such value, or it is not a number.
        """
        value: Any = outputs
        for part in self.name.removeprefix(PREFIX).split("/"):
            self._check_name(part, value if isinstance(value, Mapping) else {})
            value = value[part]
        if isinstance(value, Mapping | list | str):
            raise UsageError(f"{self.name} is {errors.type_name(value)}, but must be one number.")
        return float(value)

    def is_better(self, value: float, than: float | None, *, min_delta: float = 0.0) -> bool:
        """Returns whether a value is better than another one by more than `min_delta`.

        NaN is never better, and any other value is better than None or NaN.
        """
        if math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        return self.sign * value > self.sign * than + min_delta

    def _check_name(self, part: str, names: Mapping[str, Any]) -> None:
        if part not in names:
            known = {name: f"{PREFIX}{name}" for name in names}
            hint = errors.did_you_mean(part, known) or ": it is not a section."
            raise UsageError(f"The evaluation has no metric {self.name}{hint}")


class MetricAction(Action):
    """Base class of actions that depend on a metric of the evaluation.

    Args:
        metric: the name of the metric, such as "eval/accuracy".
        mode: "max" if higher values are better, "min" if lower ones are.
    """

    def __init__(self, metric: str, mode: str):
        self._metric = MonitoredMetric(metric, mode)

    def check(self, evaluator: "StandardEvaluator | None") -> None:
        """Checks that the evaluation has the metric."""
        self._metric.check(evaluator)
