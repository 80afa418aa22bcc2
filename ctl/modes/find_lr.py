"""--mode=find_lr: a range test of the learning rate (Smith 2017, "Cyclical learning rates")."""

import importlib.util
import math
import pathlib
from typing import Any, NamedTuple

from ml_collections import config_dict
import numpy as np
import tensorflow as tf

from ctl.configs import overrides
from ctl.errors import UsageError, print_line
from ctl.hardware import strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.keras import precision
from ctl.loop.checkpoints import warm_start
from ctl.modes import DONE, Arguments, experiment
from ctl.trainer import StandardTrainer

RATES = np.geomspace(1e-7, 10.0, 120)
_SMOOTHING = 0.9  # of the exponential average of the losses
_DIVERGED = 4.0  # times the smallest loss, at which the test ends
_WIDTH, _LINES = 40, 15  # of the plot in the terminal
_PAGE = "find_lr.html"


class RangeTest(NamedTuple):
    """The losses of a range test.

    Attributes:
        rates: the learning rate of each step.
        losses: the smoothed loss before the update with that rate.
    """

    rates: np.ndarray
    losses: np.ndarray

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate at which the loss is smallest; None if it never falls.

        The place of the steepest fall is lost in the noise of the batches if the loss falls little.
        """
        lowest = int(self.losses.argmin()) if len(self.losses) else 0
        return float(self.rates[lowest]) / 10 if lowest else None


def find_lr(arguments: Arguments) -> int:
    """Trains with a growing learning rate, prints the losses and a suggestion; keeps no weights."""
    config = _with_constant_rate(arguments.config)
    built = experiment.build(config, arguments.config_path, evaluates=False)
    if strategies.spec_of(built.hardware.strategy).coordinated:
        raise UsageError(
            "--mode=find_lr does not support parameter servers, whose workers step independently: "
            "choose another runtime.strategy."
        )
    warm_start.all_load(built.trainer, config.init, ProcessGroup(built.hardware))
    curve = measure(built.trainer)
    if built.hardware.is_chief:
        base = arguments.config.optimizer.learning_rate_batch_size
        for line in describe(curve, base / built.trainer.global_batch_size if base else 1.0):
            print_line(line)
        _write_page(curve, arguments.workdir.path / _PAGE)
    return DONE


def measure(trainer: StandardTrainer) -> RangeTest:
    """Trains one step with each rate, until the loss diverges; every process must call it.

    Raises:
        UsageError: the trainer's optimizer has a schedule, or its steps report no loss.
    """
    optimizer: Any = trainer.optimizer
    if precision.has_loss_scale(optimizer):
        optimizer = optimizer.inner_optimizer
    if callable(optimizer._learning_rate):
        raise UsageError(
            "--mode=find_lr sets the learning rate, but build_optimizer makes an optimizer with a "
            "schedule: let it call its argument."
        )
    losses: list[float] = []
    average = 0.0
    for step, rate in enumerate(RATES, start=1):
        optimizer.learning_rate = float(rate)
        outputs = trainer.train(tf.constant(1)) or {}
        if "loss" not in outputs:
            raise UsageError("--mode=find_lr requires steps that report a loss: call replica_step.")
        average = _SMOOTHING * average + (1 - _SMOOTHING) * float(outputs["loss"])
        losses.append(average / (1 - _SMOOTHING**step))  # the mean starts from 0
        if not math.isfinite(losses[-1]):
            losses.pop()
            break
        if losses[-1] > _DIVERGED * min(losses) > 0:
            break
    return RangeTest(RATES[: len(losses)], np.array(losses))


def describe(curve: RangeTest, factor: float = 1.0) -> list[str]:
    """Returns a plot of lines, and the suggestion, times the factor that the config undoes."""
    if not len(curve.rates):
        return ["The first loss is not finite: run --mode=check."]
    lines = ["    rate        loss"]
    low, high = curve.losses.min(), curve.losses.max()
    for i in range(0, len(curve.rates), math.ceil(len(curve.rates) / _LINES)):
        rate, loss = curve.rates[i], curve.losses[i]
        bar = "#" * round(_WIDTH * (loss - low) / (high - low or 1.0))
        lines.append(f"{rate:8.1e}  {loss:10.4g}  {bar}".rstrip())
    rate = curve.suggestion
    if rate is None:
        return [*lines, "The loss never falls: run --mode=check."]
    lines.append(
        f"The loss is smallest at {10 * rate:.1e}: try optimizer.learning_rate={factor * rate:.1e}"
        f"{' (for learning_rate_batch_size)' * (factor != 1)}."
    )
    return lines


def _with_constant_rate(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a locked copy of a config without schedule, warm-up and checks of the loss."""
    zeros = ("warmup_steps", "decay_steps", "learning_rate_batch_size")
    values: dict[str, Any] = {f"optimizer.{name}": 0 for name in zeros}
    values |= {"optimizer.schedule": "constant", "optimizer.schedule_arguments": {}}
    values |= {"train.on_non_finite": "ignore", "train.loss_spike": 0.0}
    return overrides.with_values(config, values)


def _write_page(curve: RangeTest, path: pathlib.Path) -> None:
    """Writes the plot as a page, if plotly is installed."""
    if importlib.util.find_spec("plotly") is None:
        print_line(
            "The plot as a page requires the package plotly: run pip install 'ctl-tensorflow[report]'."
        )
        return
    from plotly import graph_objects

    figure = graph_objects.Figure()
    figure.add_scatter(x=curve.rates, y=curve.losses, mode="lines", name="smoothed loss")
    if curve.suggestion:
        figure.add_vline(x=curve.suggestion, line_dash="dot")
        # On a logarithmic axis an annotation's position is a power of 10, unlike that of a line.
        figure.add_annotation(
            x=math.log10(curve.suggestion), y=1, yref="paper", yanchor="bottom", showarrow=False,
            text=f"{curve.suggestion:.1e}",
        )  # fmt: skip
    figure.update_layout(template="plotly_white", xaxis_title="learning rate", yaxis_title="loss")
    figure.update_xaxes(type="log", exponentformat="power", dtick=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path)
    print_line(f"{path}: the plot, for a browser.")
