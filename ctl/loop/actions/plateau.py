"""Lowers the learning rate when a metric of the evaluation has stopped improving."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ctl.built.inner_loop import loop_of
from ctl.errors import UsageError
from ctl.loop.actions.stopping import EarlyStopping
from ctl.optimizers.warm_up import Plateau
from ctl.update.gradients import optimizers_of

if TYPE_CHECKING:  # for type hints, because they import the actions
    from ctl.loop.controller import Controller
    from ctl.loop.workdir import Workdir


class ReduceOnPlateau(EarlyStopping):
    """Multiplies the rate by a factor after a number of evaluations in a row without an improvement.

    Like the Keras callback ReduceLROnPlateau, but it counts evaluations, and checkpoints hold its state.
    `optimizer.schedule=plateau` makes it.

    Args:
        metric: the name of the metric, such as "eval/loss".
        mode: "max" if higher values are better, "min" if lower ones are.
        patience: the number of evaluations in a row without an improvement.
        factor: what the rate is multiplied by.
        min_delta: a larger change than this is an improvement.
        end_factor: the lowest rate, as a fraction of the first one.
    """

    everywhere = True  # each process sets the rate of its replicas
    may_stop = False

    def __init__(self, metric: str, mode: str, *, factor: float, end_factor: float, **options: Any):
        super().__init__(metric, mode, **options)
        self._by, self._end_factor = factor, end_factor
        self._factor = 1.0
        self._schedules: list[Plateau] = []

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "ReduceOnPlateau":
        """Makes the action of a config; see registry.py."""
        from ctl.optimizers.schedules import KINDS

        given = config.optimizer.schedule_arguments.to_dict()
        return cls(**{**KINDS["plateau"].arguments, **given})

    def begin(self, controller: "Controller") -> None:
        """Finds the schedules of the trainer's optimizers."""
        super().begin(controller)
        optimizers = loop_of(controller.trainer).step.attributes.optimizers()
        rates = [each._learning_rate for o in optimizers for each in optimizers_of(o)]
        rates = [getattr(rate, "after", rate) for rate in rates]  # the warm-up's
        self._schedules = [rate for rate in rates if isinstance(rate, Plateau)]
        if not self._schedules:
            raise UsageError(
                "optimizer.schedule is plateau, but no optimizer of the trainer has this schedule: pass "
                "its learning rate on in build_optimizer, or choose optimizer.schedule=constant."
            )

    def get_state(self) -> dict[str, Any]:
        """Returns the best value, the count since, and the factor of the rate."""
        return {**super().get_state(), "factor": self._factor}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the best value, the count and the rate."""
        super().set_state(state)
        self._set(state["factor"])

    def _end_patience(self) -> None:
        reason, self._count = self._describe(self._count), 0
        factor = max(self._factor * self._by, self._end_factor)
        if factor < self._factor:
            self._set(factor)
            self.controller.reporter.print_line(
                f"{reason}: the learning rate is multiplied by {self._factor:g} from now on."
            )

    def _set(self, factor: float) -> None:
        self._factor = factor
        for schedule in self._schedules:
            schedule.factor.assign(factor)
