"""The mean loss and the other results of an inner loop."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built import metrics
from ctl.built.attributes import Attributes
from ctl.built.state import is_sum, state_of
from ctl.keras import models, precision
from ctl.rows import row_mask
from ctl.rows.waits import InputWait, ReductionWait
from ctl.update.microbatches import MicroBatch, row_count
from ctl.update.plan import Plan
from ctl.update.snapshot import Snapshot
from ctl.update.update import Update


class LoopResults:
    """Collects what an inner loop returns; create it in the strategy's scope.

    Args:
        plan: the resolved options.
        update: computes and applies the updates.
        attributes: the optimizer and the metrics.

    Attributes:
        loss: the mean loss of the applied steps.
        input_wait: how long the steps wait for their batches.
        reduction_wait: how long the steps wait for other processes.
        measures_waiting: whether the steps measure how long they wait.
        has_loss: whether the traced step reports its loss; a user's own `train_step` may not.
    """

    def __init__(self, plan: Plan, update: Update, attributes: Attributes):
        metrics.check_names(attributes.metrics, plan)
        strategy = tf.distribute.get_strategy()
        self.loss = tf_keras.metrics.Mean("loss", dtype=plan.dtype)
        self.input_wait = InputWait(strategy)
        self.reduction_wait = ReductionWait(strategy)
        self.has_loss = False
        self.measures_waiting = False
        self._plan = plan
        self._update = update
        self._attributes = attributes

    def update(self, loss: tf.Tensor, applied: tf.Tensor | bool) -> None:
        """Adds the loss of a step; call it in a replica context.

        Args:
            loss: scalar, the loss of the global batch.
            applied: scalar, whether the update was applied; True if it can never be skipped.
        """
        self.has_loss = True
        if applied is True:
            self.loss.update_state(loss)
            return
        # Not a product with the weight: a skipped loss can be NaN, and 0 x NaN is NaN.
        counted = tf.where(applied, loss, tf.zeros_like(loss))
        self.loss.update_state(counted, sample_weight=tf.cast(applied, loss.dtype))

    def measure_waiting(self) -> None:
        """Measures how long the steps wait for batches and processes, from the next inner loop on."""
        self.measures_waiting = True
        self.input_wait.enable()
        self.reduction_wait.enable()

    def update_metrics(
        self, micro_batches: Sequence[MicroBatch], update: Callable[..., None]
    ) -> None:
        """Updates the metrics with this replica's micro-batches.

        Args:
            micro_batches: the micro-batches of a step.
            update: a user's function as `StandardTrainer.update_metrics`.
        """
        rows = row_mask.current() or row_mask.Rows()
        first_row = tf.cast(rows.first_row, tf.int64)
        several = len(micro_batches) > 1
        state = state_of(self._attributes) if several else []
        # As a forward pass, every micro-batch assigns them from the values before the first one.
        snapshot = Snapshot([v for v in state if not is_sum(v)])
        for i, each in enumerate(micro_batches):
            models.attach_masks(each.outputs, each.keras_masks)
            count = row_count(each.batch)
            # The rows of the micro-batch, because its mask distinguishes padding from sample weights.
            with row_mask.examples(
                each.row_mask,
                first_row=first_row,
                step=rows.step,
                # A copy, so that every micro-batch draws the numbers of the undivided batch.
                calls=dict(rows.calls),
                count=count,
                isolated=self._plan.isolation if several else "",
            ):
                if i:
                    snapshot.restore()
                before = len(rows.graph.get_operations()) if rows.graph else 0
                metrics.call(
                    update, self._attributes.metrics, each.batch, each.outputs, each.row_mask
                )
                if several and not i:
                    sums = [v for v in state if is_sum(v)]
                    sources = [*tf.nest.flatten(each[:3]), first_row]
                    read = each.losses.values()
                    snapshot.check_assignments(sources, self._plan.isolation, sums, read)
                if rows.graph and several:
                    rows.trace.add_metrics(rows.graph.get_operations()[before:])
            first_row += tf.cast(count, tf.int64)

    def reset(self) -> None:
        """Resets what `read` returns."""
        for metric in (
            self.loss,
            *self._attributes.metrics.values(),
            *self._layer_metrics().values(),
        ):
            metric.reset_state()
        self._update.losses.reset()
        for part in self._update.parts:
            part.reset()

    def read(self) -> dict[str, Any]:
        """Returns the mean loss, the metrics, and what the options and parts of the step add.

        If no step of the loop was applied, means over the applied steps do not exist: they are NaN. A
        user's own `train_step` that does not call `replica_step` has no loss.
        """
        results = {"loss": self.loss.result()} if self.has_loss else {}
        results |= self._update.losses.result() | metrics.results(self._attributes.metrics)
        results |= metrics.results(self._layer_metrics())
        all_skipped = self.skipped_all()
        if all_skipped:
            results = tf.nest.map_structure(_to_nan, results)
        optimizer = self._attributes.optimizer
        has_scale = precision.has_loss_scale(optimizer)
        if has_scale:
            results["loss_scale"] = optimizer.loss_scale
        if has_scale or self._plan.options.on_non_finite == "skip":
            results["skipped_steps"] = self._update.skipped_steps.read_value()
        for part in self._update.parts:
            results |= part.results(all_skipped=all_skipped)
        return results

    def _layer_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        return self._attributes.layer_metrics(self._attributes.metrics)

    def skipped_all(self) -> bool:
        """Returns whether all steps of the inner loop were skipped."""
        return self.has_loss and self.may_skip() and not self.loss.count.read_value().numpy()

    def may_skip(self) -> bool:
        """Returns whether a step may be skipped."""
        # A subclass can pass `minimize` another optimizer, which has a loss scale of its own.
        return self._plan.skips or any(map(precision.has_loss_scale, self._attributes.optimizers()))


def _to_nan(value: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return value
    return tf.fill(tf.shape(value), tf.constant(math.nan, value.dtype))
