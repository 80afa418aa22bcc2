"""One replica's part in the one update that a global batch defines; docs/step.md derives it."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import tensorflow as tf

from ctl.options import Clip
from ctl.replica import gradients, loss, rows

Batch = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """The fixed part of a training step.

    Attributes:
        global_batch_size: rows of a full global batch.
        micro_batches: parts that a replica's rows are computed in, one after the other.
        clip: how the reduced gradients are clipped.
        dtype: of the weights, the denominator and the loss.
    """

    global_batch_size: int
    micro_batches: int = 1
    clip: Clip = dataclasses.field(default_factory=Clip)
    dtype: tf.DType = tf.float32

    def gradients(
        self,
        batch: Batch,
        losses: Callable[[Batch], tf.Tensor],
        *,
        variables: Sequence[tf.Variable],
        weight: tf.Tensor | None = None,
        regularization: Callable[[], Sequence[tf.Tensor]] = tuple,
    ) -> tuple[list[gradients.Gradient], tf.Tensor]:
        """The clipped gradients and the loss of the global batch, the same on every replica.

        Call it in a replica context, inside `replica.examples(...)`.

        Args:
            batch: this replica's rows.
            losses: a micro-batch -> [rows] losses, not reduced.
            variables: what to differentiate by.
            weight: [rows] sample weights, or None for 1.
            regularization: gives the scalars to add once.

        Returns:
            The gradients, None where the loss does not depend on a variable, and the loss.
        """
        parts = self._parts(batch, losses, weight, regularization)
        found, value = gradients.accumulate(parts, variables)
        found, value = gradients.all_reduce(found, value)
        return gradients.clip(found, self.clip), value

    def _parts(
        self,
        batch: Batch,
        losses: Callable[[Batch], tf.Tensor],
        weight: tf.Tensor | None,
        regularization: Callable[[], Sequence[tf.Tensor]],
    ) -> list[Callable[[], tf.Tensor]]:
        """One callable a micro-batch: its share of the global loss."""
        whole = rows.current() or rows.Examples(None, 0, 0)
        weights = loss.row_weights(weight, whole.present, self.dtype)
        count = row_count(batch)
        # Of the whole batch and before the backward pass: no micro-batch has its own denominator.
        denominator = loss.global_weight(weights, count, self.global_batch_size, self.dtype)
        cuts = [count * i // self.micro_batches for i in range(self.micro_batches + 1)]
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync

        def part(start: Any, end: Any) -> tf.Tensor:
            def cut(value: tf.Tensor | None) -> tf.Tensor | None:
                return value if value is None or self.micro_batches == 1 else value[start:end]

            first = whole.first_row + tf.cast(start, tf.int64)
            with rows.examples(cut(whole.present), first_row=first, step=whole.step):
                per_example = losses(tf.nest.map_structure(cut, batch))
                share = loss.share(per_example, cut(weights), denominator)
                penalty = loss.regularization_share(
                    list(regularization()), replicas * self.micro_batches, share.dtype
                )
            return share if penalty is None else share + penalty

        return [functools.partial(part, *pair) for pair in itertools.pairwise(cuts)]


def row_count(batch: Batch) -> int | tf.Tensor:
    """The number of rows of a batch, as a Python int where it is known."""
    first = tf.nest.flatten(batch)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
