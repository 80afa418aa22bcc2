"""One replica's part in the one update that a global batch defines; docs/step.md derives it."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import tensorflow as tf

from ctl.configs.options import Clip
from ctl.errors import UsageError
from ctl.replica import gradients, loss, row_mask
from ctl.replica.gradients import Gradient

Batch = dict[str, tf.Tensor]
Losses = Callable[[Batch], tuple[tf.Tensor, Any]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step comes to before it is applied, the same on every replica but for `parts`.

    Attributes:
        gradients: of the global batch, unscaled and clipped; None where there is none.
        unclipped: the same before clipping.
        loss: of the global batch.
        flags: [1 + gradients] bool, whether the loss and each gradient is finite; of reduced values,
            so that all replicas decide alike.
        finite: scalar bool, whether all of them are.
        parts: this replica's own micro-batches: each batch, its mask, and what `losses` gave along.
    """

    gradients: list[Gradient]
    unclipped: list[Gradient]
    loss: tf.Tensor
    flags: tf.Tensor
    finite: tf.Tensor
    parts: list[tuple[Batch, tf.Tensor | None, Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """The fixed part of a training step.

    Attributes:
        global_batch_size: rows of a full global batch.
        micro_batches: parts that a replica's rows are computed in, one after the other.
        clip: how the reduced gradients are clipped.
        dtype: of the weights, the denominator and the loss.
        reduce_dtype: what gradients travel between the replicas in; None for as they are.
        shards: if set, the gradient is the sum in a fixed order of so many shards' gradients,
            whatever number of replicas computes them.
        jit: compile the forward and backward pass by XLA, without reduction and update.
    """

    global_batch_size: int
    micro_batches: int = 1
    clip: Clip = dataclasses.field(default_factory=Clip)
    dtype: tf.DType = tf.float32
    reduce_dtype: tf.DType | None = None
    shards: int = 0
    jit: bool = False

    def global_gradients(
        self,
        batch: Batch,
        losses: Losses,
        *,
        variables: Sequence[tf.Variable],
        weight: tf.Tensor | None = None,
        regularization: Callable[[], Sequence[tf.Tensor]] = tuple,
        loss_scale: tf.Tensor | None = None,
    ) -> Result:
        """The clipped gradients and the loss of the global batch.

        Call it in a replica context, inside `replica.examples(...)`.

        Args:
            batch: this replica's rows.
            losses: a micro-batch -> [rows] losses, not reduced, and anything to hand along.
            variables: what to differentiate by.
            weight: [rows] sample weights, or None for 1.
            regularization: gives the scalars to add once.
            loss_scale: what the loss is multiplied by while gradients are computed.

        Returns:
            The result, the same on every replica.
        """
        whole = row_mask.current() or row_mask.Examples(None, 0, 0)
        weights = loss.row_weights(weight, whole.present, self.dtype)
        denominator = self._denominator(weights, row_count(batch))

        def compute(batch, present, weights, denominator, first_row, step, loss_scale):  # type: ignore[no-untyped-def]
            return self._compute(
                row_mask.Examples(present, first_row, step, whole.calls),
                batch,
                weights,
                losses=functools.partial(self._share, losses, denominator, regularization),
                variables=variables,
                loss_scale=loss_scale,
            )

        # What the step knows of its rows goes into a compiled function as arguments: a tensor of
        # the graph around it would be a constant of the first trace.
        call = tf.function(compute, jit_compile=True) if self.jit else compute
        found, values, parts = call(
            batch, whole.present, weights, denominator, whole.first_row, whole.step, loss_scale
        )
        found, value = self._reduce(found, values)
        if loss_scale is not None:
            found = gradients.unscale(found, loss_scale)
        flags = gradients.finite_flags(found, value)
        clipped = gradients.clip(found, self.clip)
        return Result(clipped, found, value, flags, tf.reduce_all(flags), parts)

    @property
    def _parts(self) -> int:
        """Micro-batches, or shards, that one replica computes."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        return self.shards // replicas if self.shards else self.micro_batches

    def _denominator(self, weights: tf.Tensor | None, count: int | tf.Tensor) -> tf.Tensor:
        """Of the whole batch, before the backward pass: no micro-batch has one of its own."""
        if self.shards and weights is not None:
            each = [tf.reduce_sum(part) for part in tf.split(weights, self._parts)]
            return gradients.sum_in_order([[value] for value in each], self.shards)[0]
        return loss.global_weight(weights, count, self.global_batch_size, self.dtype)

    def _compute(
        self,
        whole: row_mask.Examples,
        batch: Batch,
        weights: tf.Tensor | None,
        *,
        losses: Callable[[Batch, tf.Tensor | None], tuple[tf.Tensor, Any]],
        variables: Sequence[tf.Variable],
        loss_scale: tf.Tensor | None,
    ) -> tuple[list[list[Gradient]], list[tf.Tensor], list[Any]]:
        """Each part's gradients, share of the loss, and what `losses` gave along.

        Unrolled in Python, because a collective inside `tf.while_loop` (of a synchronized batch
        normalization) breaks under tf.distribute.
        """
        found, values, parts = [], [], []
        count = row_count(batch)
        cuts = [count * i // self._parts for i in range(self._parts + 1)]
        for start, end in itertools.pairwise(cuts):
            cut = functools.partial(_cut, start, end) if self._parts > 1 else _whole
            first = tf.cast(whole.first_row, tf.int64) + tf.cast(start, tf.int64)
            present, part = cut(whole.present), tf.nest.map_structure(cut, batch)
            calls = dict(whole.calls)  # every micro-batch draws as the whole batch would
            with row_mask.examples(present, first_row=first, step=whole.step, calls=calls):
                with tf.GradientTape() as tape:
                    value, along = losses(part, cut(weights))
                    scaled = value if loss_scale is None else value * loss_scale
                found.append(tape.gradient(scaled, variables))
            values.append(value)
            parts.append((part, present, along))
        whole.calls.update(calls)
        if not self.shards:
            found, values = [gradients.accumulate(found)], [tf.add_n(values)]
        return found, values, parts

    def _share(
        self,
        losses: Losses,
        denominator: tf.Tensor,
        regularization: Callable[[], Sequence[tf.Tensor]],
        batch: Batch,
        weights: tf.Tensor | None,
    ) -> tuple[tf.Tensor, Any]:
        """A part's share of the global loss, and what `losses` gave along."""
        per_example, along = losses(batch)
        found = per_example.shape
        if found.rank == 1 and not found.is_compatible_with([_static(row_count(batch))]):
            raise UsageError(
                f"per_example_loss returned {found[0]} losses for {row_count(batch)} "
                "examples: want one an example, reduced over all other axes."
            )
        share = loss.share(tf.cast(per_example, self.dtype), weights, denominator)
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        parts = replicas * self._parts
        penalty = loss.regularization_share(list(regularization()), parts, self.dtype)
        return (share if penalty is None else share + penalty), along

    def _reduce(
        self, found: list[list[Gradient]], values: list[tf.Tensor]
    ) -> tuple[list[Gradient], tf.Tensor]:
        if not self.shards:
            return gradients.all_reduce(found[0], values[0], dtype=self.reduce_dtype)
        shards = [[*each, value] for each, value in zip(found, values, strict=True)]
        *reduced, value = gradients.sum_in_order(shards, self.shards)
        return reduced, value


def row_count(batch: Batch) -> int | tf.Tensor:
    """The number of rows of a batch, as a Python int where it is known."""
    first = tf.nest.flatten(batch)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def _static(count: int | tf.Tensor) -> int | None:
    return count if isinstance(count, int) else None


def _cut(start: Any, end: Any, value: tf.Tensor | None) -> tf.Tensor | None:
    return None if value is None else value[start:end]


def _whole(value: tf.Tensor | None) -> tf.Tensor | None:
    return value
