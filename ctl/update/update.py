"""The update of a global batch on one replica, in the order of docs/step.md, section 6.

`MicroBatches` computes this replica's contributions. `Update` reduces them over the replicas,
unscales, checks and clips the gradients of the global batch, decides whether to apply the update, and
applies it on all replicas or on none.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
import pkgutil
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.hardware import devices, strategies
from ctl.keras import precision
from ctl.keras.precision import Optimizer
from ctl.keras.variables import check_scope
from ctl.rows import row_mask, waits
from ctl.update import gradients, loss, reduction
from ctl.update.gradients import Gradient
from ctl.update.held_variables import Untrained
from ctl.update.microbatches import (
    Batch,
    Contributions,
    Inputs,
    LossFn,
    MicroBatch,
    MicroBatches,
    Target,
    compute_by_xla,
    row_count,
)
from ctl.update.non_finite import LOSS, SPIKE, Decision, LossSpikes, NonFiniteRecorder, counter
from ctl.update.part import GlobalUpdate, Part, restored_variables
from ctl.update.plan import Plan
from ctl.update.snapshot import Assignable, Snapshot

_LOG = logging.getLogger("ctl")
_CHECK_CONDITION = "ctl.update.conditions:check"  # imported for an update that has one


@dataclasses.dataclass(frozen=True)
class UpdateResult:
    """The result of an update.

    Attributes:
        loss: scalar, the loss of the global batch, the same on every replica; of the first target.
        micro_batches: this replica's own micro-batches, for metrics.
        applied: scalar bool, whether the updates were applied, the same on every replica; True if this
            step can never be skipped.
        losses: the loss of each target.
        when: scalar bool, whether any of the updates is wanted; None if one has no condition.
    """

    loss: tf.Tensor
    micro_batches: list[MicroBatch]
    applied: tf.Tensor | bool
    losses: Sequence[tf.Tensor] = ()
    when: tf.Tensor | None = None


class Update:
    """Computes and applies the one update that a global batch defines.

        update = Update(plan, global_step)                      # in the strategy's scope
        result = update(batch, loss_fn, forward=forward, ...)   # in a replica context

    Args:
        plan: the resolved options.
        global_step: scalar int64, the number of consumed batches.
        assignable: returns the variables that the code of the user may assign.
        parts: what the options add to an update.
        models: returns the models that the owner of the step holds.

    Attributes:
        skipped_steps: int64 variable, the number of updates that were not applied.
        loss_spikes: the last losses, by which a spike is recognized.
        recorder: records the steps that are not finite; None if the plan does not check for them.
        losses: the means of the losses, if they have names.
        parts: the same as the argument.
        optimizers: id -> an optimizer that the traced steps use, in the order of their first use.
        variables: id -> a variable that the traced steps train.
        untrained: names what the step reads and does not train.
        unsaved: the lines of code that assign a variable which `assignable` lacks.
    """

    def __init__(
        self,
        plan: Plan,
        global_step: tf.Variable,
        assignable: Callable[[], Assignable] = Assignable,
        parts: Sequence[Part] = (),
        models: Callable[[], Sequence[tf_keras.Model]] = tuple,
    ):
        self.parts = parts
        self.untrained = Untrained(models)
        self._assignable = assignable
        self._plan = plan
        self._global_step = global_step
        self._unused: list[str] = []
        self.optimizers: dict[int, Optimizer] = {}
        self.variables: dict[int, tf.Variable] = {}
        self.unsaved: dict[str, None] = {}
        self.skipped_steps = counter("skipped_steps")
        # Created in any case, because a checkpoint holds it: a later run may switch the check on.
        self.loss_spikes = LossSpikes(plan.options.loss_spike, dtype=plan.dtype)
        self.recorder = NonFiniteRecorder() if plan.checks_finite else None
        self._factors = plan.options.loss_weights or loss.SINGLE
        self.losses = loss.LossMeans(plan.options.loss_weights, plan.dtype)

    def __call__(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        forward: Callable[[Batch], Nest] | None,
        sample_weight: loss.SampleWeight,
        targets: Sequence[Target],
        denominator: loss.Denominator = "weights",
        chosen: bool = False,
    ) -> UpdateResult:
        """Computes the update and applies it; call it in a replica context, on every replica.

        Args:
            batch: this replica's rows, preprocessed.
            loss_fn: (micro-batch, outputs) -> [rows] losses, not reduced; or [rows, ...] if the
                sample weights have that shape; or a dict of name -> losses.
            forward: micro-batch -> outputs; None if `loss_fn` calls the model itself.
            sample_weight: [rows] sample weights, or weights in the shape of the losses; None for 1; or
                a dict of name -> weights.
            targets: what to train. Steps that overflow are skipped if the optimizer is a
                LossScaleOptimizer. Several have the names of their losses, and each is reduced with the
                others, but checked, clipped and applied by itself.
            denominator: what the loss is divided by, as `StandardTrainer.denominator` returns it.
            chosen: whether the user has chosen the variables, so that the loss may depend on others.

        Returns:
            The loss, the micro-batches, and whether the update was applied.
        """
        plan = self._plan
        rows = row_mask.current()
        if rows is None:
            raise UsageError(
                "replica_step or minimize got a batch whose padding and places in the global batch are "
                "not known: a train_step of your own calls super().train_step(iterator), and minimize "
                "is called in replica_step."
            )
        conditions = [t.when for t in targets if t.when is not None]
        for each in conditions:
            pkgutil.resolve_name(_CHECK_CONDITION)(each, rows)
        # The condition of the forward pass, which all targets have in common.
        when = tf.reduce_any(conditions) if len(conditions) == len(targets) else None
        # Read once: scaling and unscaling must use the same number.
        loss_scales = [self._loss_scale(target.optimizer) for target in targets]
        is_named = bool(targets[0].name)
        factors = {t.name: 1.0 for t in targets} if is_named else self._factors

        # The denominator is that of the global batch, known before the first backward pass. A mean per
        # replica or per micro-batch would weight a row by the size of its micro-batch.
        weights = loss.weights_by_name(sample_weight, factors, rows.row_mask, plan.dtype)
        count = row_count(batch)
        numbers = loss.denominator_numbers(
            denominator, weights, rows.row_mask, count, plan.dtype, training=True
        )
        denominators = self._denominators(numbers, count)
        compute = MicroBatches(
            count=rows.micro_batches,
            loss_fn=loss_fn,
            forward=forward,
            targets=targets,
            dtype=plan.dtype,
            keep_shards=bool(plan.options.logical_shards),
            calls=rows.calls,
            isolated=plan.isolation,
            factors=factors,
            assignable=self._assignable(),
            compiled=plan.compiles_micro_batches,
            untrained=None if chosen or rows.trace.losses_only else self.untrained,
        )
        inputs = Inputs(
            batch, rows.row_mask, weights, denominators, rows.first_row, rows.step, loss_scales
        )
        rows.trace.begin_update(inputs, numbers, chosen=chosen)
        rows.trace.updates[-1].conditions += conditions
        # Where the ops of the forward pass begin, to find what they assign.
        held = self._assignable()
        snapshot = Snapshot([] if when is None else [*held.once, *held.summed])
        contributions = self._contributions(compute, inputs, rows)
        if rows.trace.losses_only:
            total = tf.add_n(contributions.losses)
            losses = tf.unstack(total) if len(targets) > 1 else [total]
            return UpdateResult(losses[0], contributions.micro_batches, True, losses)
        # Listed again, because the forward pass may have built a model.
        held = self._assignable()
        self.unsaved |= dict.fromkeys(snapshot.places_of_others([*held.once, *held.summed]))
        if when is not None:
            snapshot.restore_unless(when)

        # From here on every value is that of the global batch, the same on every replica, so all
        # replicas agree without another message.
        updates = reduce_contributions(
            contributions, targets, loss_scales, plan=plan, parts=self.parts
        )
        rows.trace.end_micro_batches(rows.graph)
        applied = [
            self._finish(update, target, decides=plan.skips or scale is not None, number=i)
            for i, (update, target, scale) in enumerate(
                zip(updates, targets, loss_scales, strict=True)
            )
        ]
        micro_batches = contributions.micro_batches
        if factors == self._factors:
            by_loss = applied if is_named else applied * len(factors)
            of_loss = dict(zip(factors, by_loss, strict=True))
            self.losses.update([each.losses for each in micro_batches], of_loss)
        losses = [update.loss for update in updates]
        all_applied = tf.reduce_all(applied) if is_named else applied[0]
        return UpdateResult(losses[0], micro_batches, all_applied, losses, when)

    def _contributions(
        self, compute: MicroBatches, inputs: Inputs, rows: row_mask.Rows
    ) -> Contributions:
        plan = self._plan
        if plan.xla != "gradients" or rows.trace.losses_only:
            return compute(inputs)
        # A micro-batch cannot read the other rows, with or without XLA.
        may_retry = plan.options.xla == "auto" and plan.micro_batches == 1
        return compute_by_xla(compute, inputs, rows, may_retry=may_retry)

    def _finish(
        self, update: GlobalUpdate, target: Target, *, decides: bool, number: int
    ) -> tf.Tensor | bool:
        """Checks, clips and applies the gradients of the global batch; returns whether it applied them.

        Args:
            update: the loss and the gradients.
            target: its variables and their optimizer.
            decides: whether gradients that are not finite are not applied.
            number: the number of the target.
        """
        plan, variables = self._plan, update.variables
        optimizer, when = target.optimizer, target.when
        trace = (row_mask.current() or row_mask.Rows()).trace
        decision = self._decide(update.gradients, update.loss, variables)
        self._warn_unused(update.gradients, variables)
        kept = Snapshot([] if when is None else restored_variables(self.parts))
        # The name of the update in the step, by which its random numbers are keyed.
        name = f"update {len(trace.updates)}" + (f".{number}" if number else "")
        with row_mask.of_update(name):
            before = [part.before(update) for part in self.parts]
        # After the reduction, because a norm is not linear: the sum of clipped contributions depends on
        # the split.
        clipped = gradients.clip(update.gradients, plan.options)
        if plan.compiles_update and plan.layout.replicas > 1:
            # A merge of the replicas would assign a counter of another scope once.
            check_scope(optimizer.variables, tf.distribute.get_strategy())
        self.optimizers[id(optimizer)] = optimizer
        self.variables |= {id(variable): variable for variable in variables}
        # A Python bool if no step can be skipped: the update is then unconditional in the graph.
        applied: tf.Tensor | bool = True
        trace.wanted.append(when)
        if decides:
            applied = decision.should_apply
            trace.applied.append(applied)
        if when is not None:
            applied = tf.logical_and(applied, when)
        with row_mask.of_update(f"{name}, optimizer"):
            if applied is not True:
                new = dataclasses.replace(decision, should_apply=applied)
                self._apply_or_skip(new, clipped, variables, optimizer, when)
            else:
                if self._waits_for_all_gradients():
                    clipped = gradients.after_all(clipped)
                gradients.apply(optimizer, clipped, variables)
            if not decides:
                self._record_non_finite(decision, when)
        with row_mask.of_update(f"{name}, after"):
            for part, noted in zip(self.parts, before, strict=True):
                part.after(update, noted, applied)
        if when is not None:
            kept.restore_unless(when)
        return applied

    def _loss_scale(self, optimizer: Optimizer) -> tf.Tensor | None:
        if precision.has_loss_scale(optimizer):
            # The scale of tf_keras is float32, and a product of float64 and float32 is an error.
            return tf.cast(optimizer.loss_scale, self._plan.dtype)
        if self._plan.options.precision == "float16":
            raise UsageError(
                "Under float16 every optimizer requires a loss scale: pass minimize a "
                "tf_keras.mixed_precision.LossScaleOptimizer."
            )
        return None

    def _denominators(
        self, weights: Mapping[str, tf.Tensor | float | None], count: int | tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Returns the weight of the global batch by the name of the loss."""
        # Losses with the same weights have one denominator, so that the replicas add it up once.
        by_id = {id(value): value for value in weights.values()}
        totals = {key: self._denominator(value, count) for key, value in by_id.items()}
        return {name: totals[id(value)] for name, value in weights.items()}

    def _denominator(self, weights: tf.Tensor | float | None, count: int | tf.Tensor) -> tf.Tensor:
        shards = self._plan.options.logical_shards
        if isinstance(weights, float):
            return tf.constant(weights, self._plan.dtype)
        if shards and weights is not None:
            # Summed like the gradients, so that its bits do not depend on the replicas either.
            shares = tf.split(weights, (row_mask.current() or row_mask.Rows()).micro_batches)
            return reduction.sum_in_order([[tf.reduce_sum(share)] for share in shares], shards)[0]
        batch_size = self._plan.layout.global_batch_size
        return loss.global_weight(weights, count, batch_size, self._plan.dtype)

    def _decide(
        self, reduced: Sequence[Gradient], value: tf.Tensor, variables: Sequence[tf.Variable]
    ) -> Decision:
        """Decides whether the update is applied, from gradients that are not yet clipped."""
        # Clipping by value turns an infinite element into the bound, and clipping by a norm turns the
        # other elements into 0 or NaN.
        names = [LOSS, *(variable.name for variable in variables)]
        first = gradients.find_non_finite(reduced, value)
        finite = first == len(names)
        # Off by default, because sorting the window of losses costs time in every step.
        if not self.loss_spikes.factor:
            return Decision(finite, finite, first, names)
        normal = tf.logical_not(self.loss_spikes.is_spike(value))
        names = [LOSS, SPIKE, *names[1:]]
        later = tf.where(normal, first + 1, 1)
        first = tf.where(first > 0, later, 0)
        return Decision(tf.logical_and(finite, normal), finite, first, names)

    def _record_non_finite(self, decision: Decision, when: tf.Tensor | None) -> None:
        """Records the step after its update, so that the record does not delay the update."""
        recorder = self.recorder
        if recorder is None:
            return
        position, is_good = recorder.add_names(decision.names), decision.should_apply
        gradients.call_unless(
            is_good if when is None else tf.logical_or(is_good, tf.logical_not(when)),
            functools.partial(self._record, position),
            arguments=(decision.first,),
            compiled=self._plan.compiles_update,
        )

    def _record(self, position: int, first: tf.Tensor, *, counts: tf.Tensor) -> None:
        """Records this step if it counts; call it as `replicas.merge` calls a function."""
        if self.recorder is None:
            return
        # Read inside of the conditional, if there is one, which orders the increment after it. Grappler
        # may remove the edge from an earlier read to the increment, if another path between them is a
        # constant.
        step = self._global_step.read_value()
        self.recorder.record(step, position + first, counts=counts)

    def _apply_or_skip(
        self,
        decision: Decision,
        clipped: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        optimizer: Optimizer,
        when: tf.Tensor | None,
    ) -> None:
        has_scale = precision.has_loss_scale(optimizer)
        recorder = self.recorder
        position = recorder.add_names(decision.names) if recorder else 0
        # An overflow is recorded only if a smaller loss scale cannot prevent it: the first steps of a
        # float16 run overflow by design, until the scale fits. A spike is recorded in any case.
        scale_can_shrink = has_scale and (optimizer.loss_scale > 1 if optimizer.dynamic else True)
        is_recorded = tf.logical_or(decision.finite, tf.logical_not(scale_can_shrink))

        def on_skip(first: Any, is_recorded: Any, *wanted: tf.Tensor, counts: tf.Tensor) -> None:
            counts = tf.reduce_all([counts, *wanted]) if wanted else counts
            self.skipped_steps.assign_add(tf.cast(counts, tf.int64))
            self._record(position, first, counts=tf.logical_and(counts, is_recorded))

        def afterwards(finite: tf.Tensor) -> None:
            if has_scale:
                precision.update_loss_scale(optimizer, finite)

        gradients.apply_or_skip(
            decision.should_apply,
            # The LossScaleOptimizer's own apply_gradients would count a skipped step in `iterations`,
            # and so advance schedules and Adam's bias correction.
            precision.inner(optimizer),
            clipped,
            variables,
            on_skip=on_skip,
            skip_arguments=(decision.first, is_recorded, *([] if when is None else [when])),
            finite=decision.finite,
            afterwards=afterwards,
            compiled=self._plan.compiles_update,
        )

    def _waits_for_all_gradients(self) -> bool:
        """Returns whether updates begin after the complete backward pass, which is faster on a CPU.

        Several replicas wait in their all-reduce. Variables on another device get each gradient as early
        as possible, since it is sent to them. On a GPU the gradients would need more memory.
        """
        plan, device = self._plan, devices.replica_devices(tf.distribute.get_strategy())[0]
        is_local = not strategies.STRATEGIES[plan.strategy].central
        return plan.layout.replicas == 1 and is_local and "CPU" in device

    def _warn_unused(self, reduced: Sequence[Gradient], variables: Sequence[tf.Variable]) -> None:
        names = [v.name for g, v in zip(reduced, variables, strict=True) if g is None]
        if names and names != self._unused:
            self._unused = names
            _LOG.warning("The loss does not depend on %s: they stay unchanged.", ", ".join(names))


def reduce_contributions(
    contributions: Contributions,
    targets: Sequence[Target],
    loss_scales: Sequence[tf.Tensor | None],
    *,
    plan: Plan,
    parts: Sequence[Part] = (),
) -> list[GlobalUpdate]:
    """Sums the contributions of the replicas, and unscales the gradients.

    Call it in a replica context, on every replica.

    Args:
        contributions: this replica's contributions.
        targets: the variables of the gradients, and the optimizers that will update them.
        loss_scales: for each target, the scale of its gradients; None if they are not scaled.
        plan: the resolved options.
        parts: what the options add to an update.

    Returns:
        The update of each target.
    """
    shards = plan.options.logical_shards
    values, losses = contributions.gradients, contributions.losses
    reduce = next((part.reduce for part in parts if part.reduce), None)
    if reduce:  # each target by itself
        reduced, loss = values[0], losses[0]
    elif shards:
        # The loss is one more value of each shard, so that its bits do not depend on the replicas.
        rows = [[*each, share] for each, share in zip(values, losses, strict=True)]
        *reduced, loss = reduction.sum_in_order(rows, shards)
    else:
        reduced, loss = reduction.all_reduce(values[0], losses[0], dtype=plan.reduce_dtype)
    if not reduce:
        waits.observe((values, losses), (reduced, loss))
    totals = tf.unstack(loss) if len(targets) > 1 else [loss]
    updates: list[GlobalUpdate] = []
    start = 0
    for target, scale, total in zip(targets, loss_scales, totals, strict=True):
        variables, end = target.variables, start + len(target.variables)
        pairs = zip(values[0][start:end], variables, strict=True)
        sparse = {id(v) for gradient, v in pairs if isinstance(gradient, tf.IndexedSlices)}
        own, start = reduced[start:end], end
        if reduce:
            update = reduce(own, total, variables, loss_scale=scale, optimizer=target.optimizer)
            updates.append(dataclasses.replace(update, sparse=sparse))
            continue
        # Before the check and the clipping, because a bound applies to the unscaled gradient.
        own = own if scale is None else gradients.unscale(own, scale)
        updates.append(GlobalUpdate(variables, own, total, sparse=sparse))
    return updates
