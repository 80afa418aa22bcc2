"""Batching: the same global batches on any number of replicas, and from any step."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, distribution
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout, WorkerShard
from tests.data.reading import (
    UNEVEN,
    check_rows_and_padding,
    numbers,
    one_line,
    pipeline_layouts,
    read_steps,
    real_ids,
)

SEED = 3
KINDS = ["source", "dataset", "unknown length"]


def make(kind, count, *, split="train"):
    """Makes new data: a source or a dataset, which is shuffled for training."""
    if kind == "source":
        return ctl.data.arrays(features(count))
    dataset = tf.data.Dataset.from_tensor_slices(features(count))
    if kind == "unknown length":
        dataset = dataset.filter(lambda _: True)
    return dataset.shuffle(4, seed=SEED) if split == "train" else dataset


def features(count):
    """Ids, and the values that `check_rows_and_padding` expects."""
    return {"id": np.arange(count), "x": np.arange(2.0 * count).reshape(count, 2) + 0.5}


def training(data, layout, *, start=0, prefetch=2, shard=None):
    return kind_of(data).training(layout, seed=SEED, start=start, prefetch=prefetch, shard=shard)


def evaluation(data, layout):
    return kind_of(data).evaluation(layout, prefetch=2)


def one_replica_ids(data, batch, steps, *, start=0, shard=None):
    """The ids of each training step on one replica."""
    layout = Layout(batch, 1)
    read = read_steps([training(data, layout, start=start, shard=shard)], layout, steps)
    return [real_ids(step) for step in read]


# Training.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "replicas", "pipelines"), [(8, 2, 1), UNEVEN])
def test_training_batches_are_those_of_one_replica(kind, batch, replicas, pipelines):
    count, steps = 11, 4
    expected = one_replica_ids(make(kind, count), batch, steps)
    assert [len(ids) for ids in expected] == [batch] * steps
    layouts = pipeline_layouts(batch, replicas, pipelines)
    streams = [training(make(kind, count), layout) for layout in layouts]
    read = read_steps(streams, layouts[0], steps)
    assert [real_ids(step) for step in read] == expected
    for step in read:
        check_rows_and_padding(step, layouts[0], batch)
    # Shapes are static, and there is a mask only where rows can be missing.
    check_spec(streams[0], layouts[0], has_mask=batch % replicas)


def check_spec(stream, layout, *, has_mask):
    spec, row_mask = stream.element_spec
    rows = layout.rows_per_replica
    assert (spec["id"].shape, spec["x"].shape) == ([rows], [rows, 2])
    if has_mask:
        assert row_mask == tf.TensorSpec([rows], tf.float32)
    else:
        assert not isinstance(row_mask, tf.TensorSpec)


@pytest.mark.parametrize("kind", KINDS)
def test_training_from_any_step_is_the_rest_of_the_uninterrupted_stream(kind):
    count, batch, steps = 11, 4, 12
    uninterrupted = one_replica_ids(make(kind, count), batch, steps)
    epochs = np.reshape(np.concatenate(uninterrupted)[: 4 * count], [4, count])
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 4
    layout = Layout(batch, 2)
    for start in (1, 7):
        read = read_steps([training(make(kind, count), layout, start=start)], layout, steps - start)
        assert [real_ids(step) for step in read] == uninterrupted[start:]


def test_training_on_a_dataset_keeps_its_order_and_continues_across_epochs():
    expected = [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert one_replica_ids(numbers(5), 4, 3) == expected
    assert one_replica_ids(numbers(5).repeat(), 4, 3) == expected
    assert one_replica_ids(numbers(5).filter(lambda _: True), 4, 3) == expected
    assert one_replica_ids(numbers(3), 8, 1) == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize(("kind", "prefetch"), [("source", -1), ("dataset", 0)])
def test_prefetching_does_not_change_the_endless_stream(kind, prefetch):
    layout = Layout(5, 2)
    stream = training(make(kind, 11), layout, prefetch=prefetch)
    read = read_steps([stream], layout, 4)
    assert [real_ids(step) for step in read] == one_replica_ids(make(kind, 11), 5, 4)
    assert stream.cardinality() == tf.data.INFINITE_CARDINALITY


def test_resuming_a_dataset_warns_that_it_is_read_again(caplog):
    def read(kind, start):
        ctl.data.distribute(make(kind, 11), 4, start_step=start)

    with caplog.at_level(logging.WARNING, "ctl"):
        read("source", 7)
        read("dataset", 0)
        kind_of(make("dataset", 11)).first(Layout(4, 1), seed=SEED, start=7)  # of a check
        assert not caplog.messages
        read("dataset", 7)
    (message,) = caplog.messages
    assert "step 7" in message and "\n" not in message


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(("replicas", "pipelines"), [(1, 1), (4, 1), (4, 2)])
def test_chunks_of_replicas_come_in_turn_and_have_the_rows_of_their_batches(
    kind, replicas, pipelines
):
    size = 3
    expected = one_replica_ids(make(kind, 22), 5, size, start=2)  # 2 + 2 + 1 + 0 rows
    found = [[] for _ in range(size)]
    for layout in pipeline_layouts(5, replicas, pipelines):
        chunks = kind_of(make(kind, 22)).chunks(layout, seed=SEED, start=2, size=size)
        for batch, mask in distribution.disable_autotune(chunks).take(replicas // pipelines):
            assert batch["x"].shape == [size, layout.rows_per_replica, 2]
            assert (mask is None) == (replicas == 1)
            for n in range(size):
                found[n] += batch["id"][n][... if mask is None else mask[n] > 0].numpy().tolist()
    assert found == expected


# Evaluation.


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(
    ("count", "batch", "replicas", "pipelines"), [(20, 4, 2, 1), (22, *UNEVEN), (2, 130, 4, 4)]
)
def test_evaluation_reads_each_example_once_and_in_order(kind, count, batch, replicas, pipelines):
    data = make(kind, count, split="eval")
    layouts = pipeline_layouts(batch, replicas, pipelines)
    steps = -(-count // batch)
    assert kind_of(data).steps(layouts[0]) == steps
    streams = [evaluation(data, layout) for layout in layouts]
    read = read_steps(streams, layouts[0], steps)
    assert [i for step in read for i in real_ids(step)] == list(range(count))
    for number, step in enumerate(read):
        check_rows_and_padding(step, layouts[0], min(batch, count - number * batch))
    check_spec(streams[0], layouts[0], has_mask=count % batch or batch % replicas)


def test_evaluation_of_a_dataset_of_unknown_length_reads_to_its_end():
    data = numbers(30).filter(lambda example: example["id"] % 10 < 7)
    layouts = pipeline_layouts(*UNEVEN)
    assert kind_of(data).steps(layouts[0]) is None
    streams = [evaluation(data, layout) for layout in layouts]
    steps = read_steps(streams, layouts[0], 6)
    assert [i for step in steps for i in real_ids(step)] == [i for i in range(30) if i % 10 < 7]
    assert [len(step) for step in steps] == [4] * 5 + [0]


@pytest.mark.parametrize("wrap", [lambda d: d, ctl.data.PerReplica, ctl.data.GlobalBatches])
def test_endless_evaluation_is_rejected(wrap):
    message = one_line(kind_of(wrap(numbers(3).repeat())).steps, Layout(2, 1))
    assert "never ends: return one without repeat" in message


# Sources: the stream does not depend on how many batches are read per call.


class Computed(ctl.data.Source):
    """A user's own source, which is called once per batch."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def gather(self, indexes):
        x = tf.cast(tf.stack([2 * indexes, 2 * indexes + 1], axis=1), tf.float64) + 0.5
        return {"id": indexes, "x": x}


@pytest.mark.parametrize("limit", [3, 16])
def test_number_of_batches_per_call_does_not_change_the_stream(monkeypatch, limit):
    """Also if a call ends between two replicas of a global batch."""
    count, steps, start, batch = 11, 9, 3, 5
    expected = one_replica_ids(Computed(count), batch, start + steps)[start:]
    layouts = pipeline_layouts(*UNEVEN)
    monkeypatch.setattr(batching, "MAX_BATCHES_PER_CALL", limit)
    data = ctl.data.arrays(features(count))
    streams = [training(data, layout, start=start) for layout in layouts]
    read = read_steps(streams, layouts[0], steps)
    assert [real_ids(step) for step in read] == expected
    for step in read:
        check_rows_and_padding(step, layouts[0], batch)


def test_large_examples_are_read_in_smaller_calls():
    sizes = {}
    for width in (1, 2**10, 2**20):
        source = ctl.data.arrays({"x": np.zeros([20, width], np.uint8)})
        sizes[width] = batching.batches_per_call(source, Layout(64, 1))
    assert sizes == {1: 16, 2**10: 16, 2**20: 1}
    assert batching.batches_per_call(Computed(20), Layout(64, 1)) == 1


@pytest.mark.parametrize("kind", KINDS[:2])
def test_shards_of_all_workers_make_up_the_stream(kind):
    workers, start = 3, 2
    shards = [WorkerShard(workers, tf.constant(i, tf.int64)) for i in range(workers)]
    by_worker = [one_replica_ids(make(kind, 11), 4, 5, start=start, shard=s) for s in shards]
    together = [ids for step in zip(*by_worker, strict=True) for ids in step]
    assert together == one_replica_ids(make(kind, 11), 4, 15, start=start)


def test_evaluation_data_repeats_after_the_last_example():
    layout = Layout(5, 2)
    stream = kind_of(ctl.data.arrays({"id": range(21)})).evaluation(layout)
    ids = [i for step in read_steps([stream], layout, 10) for i in real_ids(step)]
    assert ids == [*range(21), *range(21)]


# Layouts.


@pytest.mark.parametrize(
    ("batch", "row_counts"), [(8, [2, 2, 2, 2]), (5, [2, 2, 1, 0]), (130, [33, 33, 33, 31])]
)
def test_rows_fill_the_replicas_in_order(batch, row_counts):
    layout = Layout(batch, 4)
    assert layout.row_counts() == row_counts
    assert layout.rows_per_replica == row_counts[0]
    assert layout.even == (len(set(row_counts)) == 1)


def test_layout_of_an_input_context_knows_its_first_replica():
    context = tf.distribute.InputContext(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
    )
    layout = Layout.from_context(context, 7)
    assert layout == Layout(7, replicas=4, pipelines=2, pipeline=1)
    assert (layout.first_replica, layout.local_replicas) == (2, 2)
    assert "global_batch_size is 0, but must be an integer of at least 1" in one_line(Layout, 0, 1)
