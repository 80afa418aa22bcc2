"""Forward pass, backward pass and accumulation: the micro-batches of one replica (docs/step.md, 5)."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import logging
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.data.autograph import convert, traced
from ctl.data.elements import name_features
from ctl.data.source import Batch, MaskedBatch, Nest
from ctl.errors import UsageError
from ctl.graphs import order
from ctl.keras import models, precision
from ctl.keras.precision import Optimizer
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from ctl.update import gradients, loss
from ctl.update.empty_batches import keep_statistics, zero_outputs, zero_without_rows
from ctl.update.gradients import Gradient
from ctl.update.held_variables import Untrained
from ctl.update.snapshot import Assignable, Snapshot

_LOG = logging.getLogger("ctl")

LossFn = Callable[[Batch, Nest], tf.Tensor]


class Target(NamedTuple):
    """What a loss trains; an update has one, or several with one forward pass.

    Attributes:
        variables: the variables to train.
        optimizer: updates them; a tf_keras optimizer.
        regularization: returns the scalars that are added to the loss once.
        when: scalar bool, the same on every replica, whether to apply the update at all; None for True.
        name: the name of its loss; "" if it is the sum of all losses.
    """

    variables: Sequence[tf.Variable]
    optimizer: Optimizer
    regularization: Callable[[], Sequence[tf.Tensor]]
    when: tf.Tensor | None = None
    name: str = ""


class MicroBatch(NamedTuple):
    """One micro-batch after its forward pass.

    Attributes:
        batch: [rows, ...] tensors.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        outputs: the outputs of `forward`, 16-bit floats cast to float32; None without `forward`.
        keras_masks: the mask that tf_keras attached to each output, or None: a compiled function
            returns the outputs without their attributes.
        losses: name -> this micro-batch's share of the loss of the global batch.
    """

    batch: Batch
    row_mask: tf.Tensor | None
    outputs: Nest
    keras_masks: list[tf.Tensor | None]
    losses: dict[str, tf.Tensor]


class Inputs(NamedTuple):
    """The tensors that a replica's gradients are computed from.

    They are one argument, because a compiled function must receive them as arguments: a tensor that
    it captured would stay a constant of the first trace.

    Attributes:
        batch: [rows, ...] tensors, preprocessed.
        row_mask: [rows] mask of the rows that exist; None if all exist.
        weights: name of a loss -> its weights, [rows] or [rows, ...]; None if every row has weight 1.
        denominators: name of a loss -> scalar, the weight of the global batch.
        first_row: scalar int64, the position of the first row in the global batch.
        step: scalar int64, the global step.
        loss_scales: for each target, the scalar factor of its loss while gradients are computed; None
            for 1.
    """

    batch: Batch
    row_mask: tf.Tensor | None
    weights: Mapping[str, tf.Tensor | None]
    denominators: Mapping[str, tf.Tensor]
    first_row: tf.Tensor | int
    step: tf.Tensor | int
    loss_scales: Sequence[tf.Tensor | None]


class Contributions(NamedTuple):
    """The contributions of one replica to the update.

    Attributes:
        gradients: one list of gradients per shard, or a single list, the sum over micro-batches; those
            of all targets.
        losses: this replica's share of the global loss, per shard or as a single sum: a scalar, or a
            vector of the losses of several targets.
        micro_batches: the micro-batches, for metrics.
    """

    gradients: list[list[Gradient]]
    losses: list[tf.Tensor]
    micro_batches: list[MicroBatch]


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Computes a replica's contributions, one micro-batch after the other.

    Attributes:
        count: number of micro-batches, or of logical shards, of this replica.
        loss_fn: (micro-batch, outputs) -> [rows] losses, not reduced; or [rows, ...]; or a dict of them.
        forward: micro-batch -> outputs; None if `loss_fn` calls the model itself.
        targets: what to differentiate, by which variables.
        dtype: dtype of the loss.
        keep_shards: return the gradients of each shard instead of their sum.
        calls: number of draws so far of each random layer.
        isolated: why a micro-batch cannot read the other rows of the global batch; empty if it can.
        compiled: whether XLA compiles the computation.
        factors: name of a loss -> its factor in the sum.
        assignable: variables that a forward pass may assign. Each micro-batch starts with the values
            before the first one, so that they are assigned once.
        untrained: notes further variables that the loss depends on; None if the user has chosen
            `variables`.
    """

    count: int
    loss_fn: LossFn
    forward: Callable[[Batch], Nest] | None
    targets: Sequence[Target]
    dtype: tf.DType
    keep_shards: bool
    calls: dict[str, int]
    isolated: str = ""
    compiled: bool = False
    factors: Mapping[str, float] = dataclasses.field(default_factory=lambda: loss.SINGLE)
    assignable: Assignable = dataclasses.field(default_factory=Assignable)
    untrained: Untrained | None = None

    def __call__(self, inputs: Inputs) -> Contributions:
        """Computes the contributions; call it in a replica context.

        The loop is unrolled in Python: a collective inside `tf.while_loop` (of a synchronized batch
        normalization) fails under tf.distribute.
        """
        total = row_count(inputs.batch)
        # Python ints if the shape is static, so that XLA gets static slices.
        bounds = [total * i // self.count for i in range(self.count + 1)]
        sums: list[list[Gradient]] = []  # or the gradients of each shard
        losses: list[tf.Tensor] = []
        micro_batches: list[MicroBatch] = []
        calls = dict(self.calls)
        rows = row_mask.current() or row_mask.Rows()
        rows.trace.enter_function(inputs)
        snapshot = Snapshot(self.assignable.once if self.count > 1 else [])
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # Whether all parts of the global batch have the same number of rows, without padding.
        equal = inputs.row_mask is None and (
            total % self.count == 0 if isinstance(total, int) else replicas * self.count == 1
        )
        for start, end in itertools.pairwise(bounds):
            # The sum over the earlier micro-batches comes first: it frees their activations, so that
            # only those of a single micro-batch exist at a time.
            earlier = [*sums[-1], losses[-1]] if losses else []
            with order.run_after(earlier, inputs, compiled=self.compiled) as values:
                # A single micro-batch is not sliced, which saves an op per tensor. A shard is, so that
                # its graph is the same on any number of replicas: oneDNN fuses the gradients of a
                # convolution's kernel and bias depending on the op that feeds the convolution.
                is_whole = self.count == 1 and not self.keep_shards
                part = values if is_whole else _cut(values, start, end)
                # Every micro-batch draws the numbers of the undivided batch.
                calls = dict(self.calls)
                if micro_batches:
                    snapshot.restore()
                with keep_statistics(self.assignable.statistics, part.row_mask):
                    new, share, micro_batch = self._compute(part, calls, equal=equal)
            if self.count > 1 and not micro_batches:
                # Every micro-batch must assign the same value, which is then the value of the batch.
                sources = [*_row_tensors(part), part.first_row]
                once, summed, _ = self.assignable
                added = [v for v in summed if v.aggregation == tf.VariableAggregation.SUM]
                read = micro_batch.losses.values()
                snapshot.check_assignments(sources, self.isolated, added, read)
                for place in snapshot.places_of_others([*once, *summed]):
                    raise UsageError(
                        f"{place} assigns a variable once per micro-batch: make it an attribute of the "
                        "trainer, of a layer or of a tf.Module that the trainer holds, so that it is "
                        "assigned once per step, and saved."
                    )
            if sums and not self.keep_shards:
                sums = [gradients.accumulate([sums[0], new])]
            else:
                sums.append(new)
            losses.append(share)
            micro_batches.append(micro_batch)
        # A second update in the same step continues the count, so that it draws other numbers.
        self.calls.update(calls)
        return Contributions(
            sums, losses if self.keep_shards else [tf.add_n(losses)], micro_batches
        )

    def _compute(
        self, inputs: Inputs, calls: dict[str, int], *, equal: bool
    ) -> tuple[list[Gradient], tf.Tensor, MicroBatch]:
        """Computes the gradients and the share of the loss of one micro-batch."""
        batch, mask, weights = inputs.batch, inputs.row_mask, inputs.weights
        rows = row_count(batch)
        # Entered around the backward pass too: the gradients of layers (synchronized batch
        # normalization) read the mask.
        may_be_empty = mask is not None and not isinstance(rows, int)
        with row_mask.examples(
            mask,
            first_row=inputs.first_row,
            step=inputs.step,
            calls=calls,
            count=rows,
            isolated=self.isolated,
            compiled=self.compiled,
        ) as examples:
            # Persistent for several gradients, and for a micro-batch that may have no rows.
            several = len(self.targets) > 1
            with tf.GradientTape(persistent=may_be_empty or several) as tape:
                outputs = None
                if self.forward:
                    outputs = precision.cast_to_float32(convert(self.forward)(batch))
                losses = loss.compute(self.loss_fn, batch, outputs, self.factors)
                examples.trace.add_micro_batch(
                    (batch, mask, weights), inputs.first_row, rows, list(losses.values())
                )
                shares = [
                    loss.contribution(
                        tf.cast(value, self.dtype),
                        weights[name],
                        inputs.denominators[name],
                        rows=rows,
                    )
                    for name, value in losses.items()
                ]
                named = dict(zip(losses, zero_without_rows(shares, mask, rows), strict=True))
                totals, differentiated = [], []
                for target, scale in zip(self.targets, inputs.loss_scales, strict=True):
                    name = target.name
                    share = named[name] if name else loss.weighted_sum(named, self.factors)
                    penalty = self._penalty(
                        target.regularization, _row_tensors(inputs), examples.trace, equal=equal
                    )
                    terms = [share] if penalty is None else [share, penalty]
                    share = share if penalty is None else share + penalty
                    # Without rows, only the gradient of the penalty counts.
                    terms = terms if may_be_empty else [share]
                    totals.append(share)
                    # Only what is differentiated is scaled; the reported loss is not.
                    differentiated.append(terms if scale is None else [t * scale for t in terms])
            new: list[Gradient] = []
            for target, terms in zip(self.targets, differentiated, strict=True):
                variables, count = target.variables, len(target.variables)
                more = self.untrained.find(tape, variables) if self.untrained else []
                own, *others = [tape.gradient(term, [*variables, *more]) for term in terms]
                if self.untrained:
                    self.untrained.note(more, own[count:])
                own, *others = [values[:count] for values in (own, *others)]
                own = zero_without_rows(own, mask, rows)
                new += gradients.accumulate([own, *others]) if others else own
            examples.trace.add_gradients(new)
        keras_masks = models.masks_of(outputs)
        if may_be_empty:  # a metric multiplies them by the mask
            outputs = zero_outputs(outputs, mask, rows)
        total = tf.stack(totals) if several else totals[0]
        return new, total, MicroBatch(batch, mask, outputs, keras_masks, named)

    def _penalty(
        self,
        regularization: Callable[[], Sequence[tf.Tensor]],
        rows: Sequence[tf.Tensor | None],
        trace: Trace,
        *,
        equal: bool,
    ) -> tf.Tensor | None:
        """Returns a micro-batch's share of a regularization; `rows` are its tensors of rows."""
        penalties = list(convert(regularization)())
        trace.add_penalties(loss.check_regularization(penalties, rows, equal=equal))
        # Every micro-batch of every replica adds its part, even without rows: the sum has it once.
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        return loss.regularization_contribution(penalties, replicas * self.count, self.dtype)


def compute_by_xla(
    compute: MicroBatches, inputs: Inputs, rows: row_mask.Rows, *, may_retry: bool
) -> Contributions:
    """Computes the contributions in one XLA program, which cannot communicate.

    Reduction and update stay outside: XLA on one replica cannot call the other replicas, nor assign
    variables of other devices.

    Args:
        compute: the micro-batches.
        inputs: their inputs.
        rows: the rows of the replica.
        may_retry: compute without XLA if the trainer's code communicates, which is not known before it
            is traced.
    """
    refused, folded = len(rows.trace.refused), len(rows.trace.folded)
    try:
        return traced(compute.__call__, jit_compile=True)(inputs)
    except UsageError:
        if len(rows.trace.refused) == refused or not may_retry:
            raise
    del rows.trace.folded[folded:]
    _warn_of_communication(rows.trace.refused[-1])
    return dataclasses.replace(compute, isolated="", compiled=False)(inputs)


@functools.cache
def _warn_of_communication(function: str) -> None:
    _LOG.warning(
        "runtime.xla=auto compiles nothing, because the trainer calls %s, which communicates: "
        "runtime.xla=autocluster compiles the parts between the collectives.",
        function,
    )


def row_count(batch: Batch) -> int | tf.Tensor:
    """Returns the number of rows of a batch: a Python int if it is static, else a scalar tensor."""
    first = tf.nest.flatten(batch)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def hide_rows(values: Nest) -> Nest:
    """Returns tensors whose static shapes do not tell their number of rows; None stays None."""

    def hide(value: Any) -> Any:
        shape = [None, *value.shape[1:]]
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=shape)

    return tf.nest.map_structure(lambda value: None if value is None else hide(value), values)


def unpack(element: Nest) -> tuple[Batch, tf.Tensor | None]:
    """Splits an element of a dataset into the batch and its row mask.

    Args:
        element: a `MaskedBatch` of an input pipeline. An element of a user's own dataset may also be a
            batch, `(batch, row_mask)`, `(x, label)` or `(x, label, weight)`.

    Returns:
        The batch, and its row mask; None if all rows exist.
    """
    if isinstance(element, MaskedBatch):
        return element
    is_pair = isinstance(element, tuple) and len(element) == 2
    if is_pair and isinstance(element[0], dict) and not isinstance(element[1], dict):
        batch, second = element
        part = getattr(second, "values", [second])[0]  # of the first replica
        known = tf.get_static_value(part)  # None in a trace
        if second is None or ("label" in batch and (known is None or {*known.ravel()} <= {0, 1})):
            return batch, second
        if "label" in batch or getattr(part, "dtype", "") in ("float32", "bool"):
            raise UsageError(
                f"An element of the dataset is a dict of {', '.join(batch)}, and a tensor that may be "
                'the labels or the row mask: put the labels into the dict as "label", and rename '
                'features called "label" or "weight".'
            )
    return name_features(element), None


def first_rows(element: Nest, strategy: tf.distribute.Strategy) -> Nest:
    """Returns the rows of the first replica; if it has one, those of all replicas of the process."""

    def select(value: Any) -> Any:
        values = strategy.experimental_local_results(value)
        is_single = values[0] is not None and values[0].shape[0] == 1
        return tf.concat(values, 0) if is_single else values[0]

    return tf.nest.map_structure(select, element)


def _row_tensors(inputs: Inputs) -> list[tf.Tensor | None]:
    """Returns the tensors that have one entry per row."""
    return [*tf.nest.flatten((inputs.batch, inputs.weights)), inputs.row_mask]


def _cut(inputs: Inputs, start: int | tf.Tensor, end: int | tf.Tensor) -> Inputs:
    """Returns the rows of one micro-batch."""

    def cut(value: Any) -> Any:
        return None if value is None else value[start:end]

    return inputs._replace(
        batch=tf.nest.map_structure(cut, inputs.batch),
        row_mask=cut(inputs.row_mask),
        weights={name: cut(value) for name, value in inputs.weights.items()},
        first_row=tf.cast(inputs.first_row, tf.int64) + tf.cast(start, tf.int64),
    )
