"""The stream of a source: batches of the sampler's examples, however many are read per call."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, sampler
from ctl.data.layout import Layout, WorkerShard
from tests.data.reading import (
    check_rows_and_padding,
    pipeline_layouts,
    read_steps,
    real_ids,
)

SEED = 3


def in_memory(count):
    return ctl.data.arrays(
        {"id": np.arange(count), "x": np.arange(2.0 * count).reshape(count, 2) + 0.5}
    )


class Computed(ctl.data.Source):
    """A user's own source, which is called once per batch."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def gather(self, indexes):
        x = tf.cast(tf.stack([2 * indexes, 2 * indexes + 1], axis=1), tf.float64) + 0.5
        return {"id": indexes, "x": x}


def training_ids(source, batch, steps, *, start=0, shard=None):
    """The ids of each step on one replica."""
    layout = Layout(batch, 1)
    stream = batching.training_batches(source, layout, seed=SEED, start=start, shard=shard)
    return [real_ids(step) for step in read_steps([stream], layout, steps)]


@pytest.mark.parametrize("start", [0, 2, 2**40])
def test_training_batches_hold_the_examples_of_the_sampler(start):
    positions = tf.range(start * 4, start * 4 + 12, dtype=tf.int64)
    indexes = sampler.example_indexes(positions, count=11, seed=SEED, span=12)
    ids = training_ids(ctl.data.arrays({"id": range(11)}), 4, 3, start=start)
    assert ids == indexes.numpy().reshape(3, 4).tolist()


@pytest.mark.parametrize("limit", [1, 3, 16])
@pytest.mark.parametrize(("batch", "replicas", "pipelines"), [(5, 1, 1), (7, 4, 2)])
def test_number_of_batches_per_call_does_not_change_the_stream(
    monkeypatch, batch, replicas, pipelines, limit
):
    """Also if a call ends between two replicas of a global batch."""
    count, steps, start = 11, 9, 3
    expected = training_ids(Computed(count), batch, start + steps)[start:]
    layouts = pipeline_layouts(batch, replicas, pipelines)
    monkeypatch.setattr(batching, "MAX_BATCHES_PER_CALL", limit)
    read = read_steps(
        [
            batching.training_batches(in_memory(count), layout, seed=SEED, start=start)
            for layout in layouts
        ],
        layouts[0],
        steps,
    )
    assert [real_ids(step) for step in read] == expected
    for step in read:
        check_rows_and_padding(step, layouts[0], batch)


def test_large_examples_are_read_in_smaller_calls():
    sizes = {}
    for features in (1, 2**10, 2**20):
        source = ctl.data.arrays({"x": np.zeros([20, features], np.uint8)})
        sizes[features] = batching.batches_per_call(source, Layout(64, 1))
    assert sizes == {1: 16, 2**10: 16, 2**20: 1}
    assert batching.batches_per_call(Computed(20), Layout(64, 1)) == 1


@pytest.mark.parametrize("source", [in_memory(11), Computed(11)], ids=["in memory", "computed"])
def test_shards_of_all_workers_make_up_the_stream(source):
    workers, start = 3, 2
    shards = [WorkerShard(workers, tf.constant(i, tf.int64)) for i in range(workers)]
    by_worker = [training_ids(source, 4, 5, start=start, shard=shard) for shard in shards]
    together = [ids for step in zip(*by_worker, strict=True) for ids in step]
    assert together == training_ids(source, 4, 15, start=start)


@pytest.mark.parametrize("count", [20, 21])
def test_evaluation_continues_with_padding_after_the_last_example(count):
    layout = Layout(5, 1)
    stream = batching.evaluation_batches(ctl.data.arrays({"id": range(count)}), layout)
    steps = read_steps([stream], layout, 8)
    assert [i for step in steps for i in real_ids(step)] == list(range(count))
    assert real_ids(steps[-1]) == []
