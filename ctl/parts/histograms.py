"""Histograms of the gradients of the global batch, for TensorBoard."""

from collections.abc import Collection, Mapping
import logging

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.hardware import strategies
from ctl.rows import row_mask
from ctl.update.gradients import elements, modulus
from ctl.update.part import GlobalUpdate, Part
from ctl.update.plan import Plan

_LOG = logging.getLogger("ctl")


class GradientHistograms(Part):
    """Writes the gradients, not clipped, in the steps whose number `histogram_interval` divides."""

    def __init__(self, options: TrainerOptions):
        self.options = options
        self._is_traced = self._is_warned = False
        self._obstacle = ""

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Finds out whether the step can write histograms."""
        self._obstacle = find_obstacle(plan)

    def before(self, update: GlobalUpdate) -> None:
        """Writes the histograms."""
        rows = row_mask.current()
        if self._obstacle or rows is None:
            return
        self._is_traced = True
        interval = self.options.histogram_interval
        with tf.summary.record_if(tf.equal(rows.step % interval, 0)):
            for gradient, variable in zip(update.gradients, update.variables, strict=True):
                if gradient is not None:
                    name = f"gradients/{variable.name.removesuffix(':0')}"
                    tf.summary.histogram(name, modulus(elements(gradient)))

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Warns if the step writes no histograms."""
        if not self._is_traced and not self._is_warned:
            why = self._obstacle or "the trainer's own step does not call minimize"
            _LOG.warning(
                "summaries.histogram_interval writes no histograms of the gradients: %s.", why
            )
        self._is_warned = True


def find_obstacle(plan: Plan) -> str:
    """Returns why histograms of the gradients cannot be written in the step; "" if they can."""
    if plan.compiles_update:
        return (
            f"runtime.xla={plan.xla} compiles them into one program with the update: choose "
            "runtime.xla=gradients, autocluster or off"
        )
    spec = strategies.STRATEGIES[plan.strategy]
    if spec.coordinated:
        return "they are on the workers of parameter servers: choose another runtime.strategy"
    if spec.remote:
        return "a TPU cannot write files"
    return ""
