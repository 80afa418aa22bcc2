"""Batches of sequences of similar length: a fixed number of shapes, each padded to its bucket.

The examples are sorted by length and cut into groups at multiples of the global batch size B. So a
group fills complete batches: the rest of a bucket, its longest examples, moves to the next bucket. An
epoch of n examples then has n / B batches, in a seeded order; only the last group may have a rest,
which continues in the next epoch, as the batches of any other source do.

With n examples, epoch e begins at step floor(e n / B): its batches are those that end in
[e n, (e + 1) n) if one counts examples, so step k is in the epoch ((k + 1) B - 1) div n. The last group,
of g examples, has the batches floor(e g / B) to floor((e + 1) g / B) of its own stream in it, since the
other groups have multiples of B. So every step is computed from its number alone.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import ragged, sampler
from ctl.data.source import Batch, Source
from ctl.errors import UsageError


def bucketed(
    source: Source, boundaries: Sequence[int], *, lengths: str | None = None
) -> "Bucketed":
    """Groups examples by length; each global batch is padded to one of the boundaries.

        ctl.data.bucketed(reviews, [64, 128, 256])

    Every sequence is padded with zeros at the end. Batches also have `segment_ids`, [length] int32, 1
    for a token and 0 for padding, and `positions`, [length] int32. If the source has no `weight`, and
    its `label` is not one value per example, `weight`, [length] float32, is 1 for a token, else 0.

    All examples are read once per epoch. The bucket of a step is a function of the run's seed and the
    step. Up to a global batch of the longest examples of a bucket are padded to the next boundary.

    Args:
        source: examples with at least one feature of variable length; if it has several, they have
            the same length in an example.
        boundaries: the increasing lengths of the shapes; the last one is at least the longest length.
        lengths: a file that keeps the lengths of the sequences, as for `ctl.data.packed`.

    Raises:
        UsageError: the boundaries do not increase, or a sequence is longer than the last one.
    """
    values = list(boundaries) if isinstance(boundaries, Sequence) else []
    is_count = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
    if not values or not is_count or values != sorted(set(values)):
        raise UsageError(
            f"ctl.data.bucketed got boundaries={boundaries!r}, but requires increasing positive "
            "integers, such as [64, 128, 256]."
        )
    spec = ragged.batch_spec(source, "ctl.data.bucketed")
    sizes = ragged.read_lengths(source, lengths)
    too_long = int((sizes > values[-1]).sum())
    if too_long:
        raise UsageError(
            f"{too_long:,} of {len(sizes):,} sequences are longer than the last boundary, "
            f"{values[-1]}: add {sizes.max()} to the boundaries."
        )
    return Bucketed(source, spec, sizes, values)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Examples that are padded to one boundary.

    Attributes:
        bucket: the index of the boundary.
        first: the place of its first example in the order of increasing length.
        count: the number of its examples; a multiple of the global batch size, except in the last.
    """

    bucket: int
    first: int
    count: int


class Bucketed(ragged.Grouped):
    """Sequences in batches of similar length.

    `gather` takes the indexes `bucket x len(self) + example`, because all replicas must pad to the same
    length, even if their own rows are short. A batch whose indexes are only the examples may have any
    length.

    Args:
        source: the sequences.
        spec: the specs of a batch of them.
        lengths: [sequences] int64.
        boundaries: the lengths of the shapes.
    """

    has_one_shape = False

    def __init__(
        self, source: Source, spec: dict[str, Any], lengths: np.ndarray, boundaries: list[int]
    ):
        self._source, self.inner_sources = source, (source,)
        self._boundaries = boundaries
        label = spec.get("label")
        self._adds_weight = "weight" not in spec and (label is None or ragged.is_ragged(label))
        order = np.argsort(lengths, kind="stable")
        # [examples] the index of the smallest boundary that is long enough, in the order of `order`.
        buckets = np.searchsorted(boundaries, lengths[order])
        # The number of examples that fit into each boundary.
        self._totals = np.searchsorted(buckets, np.arange(len(boundaries)), side="right")
        with tf.init_scope(), tf.device("CPU:0"):
            self._lengths = tf.constant(lengths, tf.int64)
            self._order = tf.constant(order, tf.int64)
            self._buckets = tf.constant(buckets, tf.int64)

    def __len__(self) -> int:
        """The number of examples."""
        return int(self._totals[-1])

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples and pads them to the boundary of their bucket."""
        examples = indexes % len(self)
        lengths = tf.gather(self._lengths, examples)
        boundaries = tf.constant(self._boundaries, tf.int64)
        needed = tf.searchsorted(boundaries, tf.reduce_max(lengths)[tf.newaxis], out_type=tf.int64)
        length = tf.gather(boundaries, tf.maximum(indexes[0] // len(self), needed[0]))
        batch = ragged.read_batch(self._source, examples)
        batch = ragged.verify_lengths(batch, lengths)
        position = tf.range(length)[tf.newaxis, :]
        is_token = position < lengths[:, tf.newaxis]
        batch["segment_ids"] = tf.cast(is_token, tf.int32)
        batch["positions"] = tf.cast(tf.where(is_token, position, 0), tf.int32)
        if self._adds_weight:
            batch["weight"] = tf.cast(is_token, tf.float32)
        return {name: _pad(value, length) for name, value in batch.items()}

    def training_order(
        self, positions: tf.Tensor, *, batch_size: int, seed: int, span: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples at positions of the training stream; see the module."""
        count, groups = len(self), self._groups(batch_size)
        step, row = positions // batch_size, positions % batch_size
        epoch = ((step + 1) * batch_size - 1) // count
        epochs = 2 + (span + batch_size) // count  # at most, those that the positions touch
        # Every epoch has `batches` batches, and some epochs have one more at the end.
        batches, place = count // batch_size, step - epoch * count // batch_size
        shuffled = sampler.example_indexes(
            epoch * batches + tf.minimum(place, batches - 1),
            count=batches,
            seed=sampler.derive_seed(seed, "buckets"),
            span=span // batch_size + 2,
        )
        batch = tf.where(place < batches, shuffled, batches)
        indexes, seeds = tf.zeros_like(positions), tf.zeros([tf.size(positions), 2], tf.int64)
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            first = group.first // batch_size
            # The epoch's first batch in the stream of the group.
            begin = epoch * group.count // batch_size
            is_chosen = batch >= first
            if not is_last:
                is_chosen &= batch < (group.first + group.count) // batch_size
            own_batch = begin + tf.where(is_chosen, batch - first, 0)
            own = own_batch * batch_size + tf.where(is_chosen, row, 0)
            # The sampler requires the smallest position first; batches of an epoch are in any order.
            own = tf.concat([begin[:1] * batch_size, own], axis=0)
            order = {
                "count": group.count,
                "seed": sampler.derive_seed(seed, f"bucket {group.bucket}"),
                "span": epochs * group.count + batch_size,
            }
            places = sampler.example_indexes(own, **order)
            examples = tf.gather(self._order, group.first + places)
            own_seeds = sampler.augmentation_seeds(own, examples, **order)[1:]
            index = examples[1:] + group.bucket * count
            indexes = tf.where(is_chosen, index, indexes)
            seeds = tf.where(is_chosen[:, tf.newaxis], own_seeds, seeds)
        return indexes, seeds

    def evaluation_order(self, positions: tf.Tensor, *, batch_size: int) -> tf.Tensor:
        """Returns the examples in the order of increasing length; a batch is padded to its longest."""
        end = tf.minimum((positions[0] // batch_size + 1) * batch_size, len(self))
        return tf.gather(self._order, positions) + self._buckets[end - 1] * len(self)

    def _groups(self, batch_size: int) -> list[_Group]:
        """Returns the groups for a global batch size; the last one has at least one batch."""
        count = len(self)
        if count < batch_size:
            raise UsageError(
                f"ctl.data.bucketed has {count} examples, but the global batch size is {batch_size}: "
                "choose a smaller data.global_batch_size."
            )
        ends = self._totals // batch_size * batch_size
        last = int(np.searchsorted(self._totals, count))  # the first bucket that holds the longest
        ends = np.minimum(ends[:last], count // batch_size * batch_size - batch_size)
        cuts = [0, *ends.tolist(), count]
        groups = (_Group(i, cuts[i], cuts[i + 1] - cuts[i]) for i in range(last + 1))
        return [group for group in groups if group.count]


def _pad(value: Any, length: tf.Tensor) -> tf.Tensor:
    """Pads sequences to [rows, length, ...]; returns other features as they are."""
    if not ragged.is_ragged(value):
        return value
    # The length is a tensor, so it cannot be an argument of `to_tensor`.
    padded = value.to_tensor()
    rest = length - tf.shape(padded, tf.int64)[1]
    return tf.pad(padded, [[0, 0], [0, rest]] + [[0, 0]] * (padded.shape.rank - 2))
