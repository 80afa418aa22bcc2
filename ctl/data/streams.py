"""A source's examples as a stream of per-replica batches, each row where the layout has it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.data import sampler
from ctl.data.augmentation import Augment
from ctl.data.layout import Layout, WorkerShard
from ctl.data.source import Arrays, Indexes, Source

# One call of the sampler and of a source in memory draws so much: a call costs 0.1 ms whatever it
# draws, and what it drew stays in the processor's cache until it is read.
MOST_AT_ONCE = 16  # per-replica batches
BYTES_AT_ONCE = 2 * 2**20


class Draw(NamedTuple):
    """The rows of some consecutive per-replica batches, one after the other.

    Attributes:
        examples: [batches x rows, ...] tensors.
        seeds: [batches x rows, 2] int64, of random augmentation.
        present: [batches, rows] mask, or None where all rows exist.
    """

    examples: Any
    seeds: tf.Tensor
    present: tf.Tensor | None


def training(
    source: Source, layout: Layout, *, seed: int, start: int, turns: WorkerShard | None = None
) -> tf.data.Dataset:
    """The endless, shuffled stream of `(batch, present)`, from a global step on.

    Args:
        source: the examples.
        layout: which rows this pipeline feeds to which replicas.
        seed: the run's seed.
        start: the global step of the first batch.
        turns: which batches from there on, where not all.
    """
    size = at_once(source, layout)
    drawn = training_chunks(source, layout, seed=seed, start=start, size=size, turns=turns)
    if size > 1:
        return drawn.unbatch()
    return drawn.map(  # does not copy the batch, as unbatch would
        lambda batch, present: (
            tf.nest.map_structure(lambda x: x[0], batch),
            None if present is None else present[0],
        )
    )


def training_chunks(
    source: Source,
    layout: Layout,
    *,
    seed: int,
    start: int,
    size: int,
    turns: WorkerShard | None = None,
) -> tf.data.Dataset:
    """As `training`, `size` of its elements at a time, on a first axis."""
    draw = _draws(source, layout, seed=seed, start=start, size=size, turns=turns)

    def fold(values: tf.Tensor) -> tf.Tensor:
        folded = tf.reshape(values, tf.concat([[size, layout.rows], tf.shape(values)[1:]], axis=0))
        return tf.ensure_shape(folded, [size, layout.rows, *values.shape[1:]])

    def chunk(index: tf.Tensor) -> tuple[Any, tf.Tensor | None]:
        drawn = draw(index)
        return tf.nest.map_structure(fold, drawn.examples), drawn.present

    # A call a core, unless calls are so large that two fill the memory's bandwidth.
    calls = tf.data.AUTOTUNE if size <= MOST_AT_ONCE else 2
    return tf.data.Dataset.counter().map(chunk, num_parallel_calls=calls, deterministic=True)


def augmented(
    source: Source,
    augment: Augment,
    layout: Layout,
    *,
    seed: int,
    start: int,
    turns: WorkerShard | None = None,
) -> tf.data.Dataset:
    """As `training`, each example through `augment(example, seed)`."""
    size = at_once(source, layout)
    draw = _draws(source, layout, seed=seed, start=start, size=size, turns=turns)

    def rows(index: tf.Tensor) -> tuple[Any, ...]:
        drawn = draw(index)
        masks = () if drawn.present is None else (tf.reshape(drawn.present, [-1]),)
        return drawn.examples, drawn.seeds, *masks

    def row(example: Any, seeds: tf.Tensor, *mask: tf.Tensor) -> tuple[Any, ...]:
        return augment(example, seeds), *mask

    auto = tf.data.AUTOTUNE
    drawn = tf.data.Dataset.counter().map(rows, num_parallel_calls=auto, deterministic=True)
    examples = drawn.unbatch().map(row, num_parallel_calls=auto, deterministic=True)
    batches = examples.batch(layout.rows, drop_remainder=True)
    return batches if not layout.even else batches.map(lambda batch: (batch, None))


def evaluation(source: Source, layout: Layout) -> tf.data.Dataset:
    """The stream of `(batch, present)` of every example once, in order, then of absent rows."""
    offsets = tf.range(layout.rows, dtype=tf.int64)
    batch, local = layout.global_batch_size, layout.local_replicas
    count = len(source)

    def element(index: tf.Tensor) -> tuple[Any, tf.Tensor | None]:
        step, replica = index // local, layout.first_replica + index % local
        positions = step * batch + replica * layout.rows + offsets
        end = tf.minimum((step + 1) * batch, count)
        examples = source.gather(tf.minimum(positions, end - 1))
        return examples, tf.cast(positions < end, tf.float32)

    counter = tf.data.Dataset.counter()
    return counter.map(element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def at_once(source: Source, layout: Layout) -> int:
    """How many per-replica batches to draw in one call: several where examples are in memory.

    A person's own source may decode images: it gets a batch a call, so that calls run in parallel.
    """
    if not isinstance(source, Arrays | Indexes):
        return 1
    return max(1, min(MOST_AT_ONCE, BYTES_AT_ONCE // max(1, source.row_bytes * layout.rows)))


def _draws(
    source: Source, layout: Layout, *, seed: int, start: int, size: int, turns: WorkerShard | None
) -> Callable[[tf.Tensor], Draw]:
    """What draws the per-replica batches [index x size, (index + 1) x size) of the stream."""
    batch, local, count = layout.global_batch_size, layout.local_replicas, len(source)
    elements = tf.range(size, dtype=tf.int64)[:, tf.newaxis]
    offsets = tf.range(layout.rows, dtype=tf.int64)[tf.newaxis, :]
    first, stride = (start, 1) if turns is None else (start + turns.index, turns.count)
    span = ((size + local - 2) // local * stride + 1) * batch

    def draw(index: tf.Tensor) -> Draw:
        element = index * size + elements
        step, replica = first + element // local * stride, layout.first_replica + element % local
        rows = replica * layout.rows + offsets
        positions = tf.reshape(step * batch + tf.minimum(rows, batch - 1), [-1])
        indexes = sampler.shuffled(positions, count=count, seed=seed, span=span)
        seeds = sampler.seeds(positions, indexes, count=count, seed=seed, span=span)
        present = None if layout.even else tf.cast(rows < batch, tf.float32)
        return Draw(source.gather(indexes), seeds, present)

    return draw
