"""The pipeline: the same global batches on any number of replicas and pipelines, and from any step."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import pipeline, sampler
from ctl.data.pipeline import Layout

SEED = 3
KINDS = ["source", "dataset", "tfrecords"]
# Global batch, replicas, pipelines: even shares, uneven ones, empty ones, more pipelines than one.
LAYOUTS = [
    (8, 1, 1),
    (5, 1, 1),
    (8, 2, 1),
    (5, 2, 1),
    (7, 4, 1),
    (3, 4, 1),
    (130, 4, 1),
    (8, 2, 2),
    (5, 2, 2),
    (7, 4, 2),
    (3, 4, 2),
    (130, 4, 4),
    (5, 8, 4),
]


@pytest.fixture
def make(tmp_path):
    """Makes n examples anew, as a source, a shuffled dataset or shuffled TFRecords."""

    def build(kind, count, *, split="train", cache=False):
        features = {"id": np.arange(count), "x": np.arange(2.0 * count).reshape(count, 2) + 0.5}
        if kind == "source":
            return ctl.data.arrays(features)
        if kind == "dataset":
            dataset = tf.data.Dataset.from_tensor_slices(features)
            return dataset.shuffle(4, seed=SEED) if split == "train" else dataset
        for shard in range(min(3, count)):
            path = tmp_path / f"{count}-{shard}.tfrecord"
            if not path.exists():
                write_records(path, range(shard, count, min(3, count)))
        return ctl.data.tfrecords(
            str(tmp_path / f"{count}-*.tfrecord"),
            parse_record,
            split=split,
            seed=SEED,
            tuning={"shuffle_buffer": 4, "cache": cache},
        )

    return build


def write_records(path, ids):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in ids:
            writer.write(str(i).encode())


def parse_record(record):
    i = tf.strings.to_number(record, tf.int64)
    return {"id": i, "x": tf.cast(tf.stack([2 * i, 2 * i + 1]), tf.float64) + 0.5}


def train_stream(data, layout, *, start=0, prefetch=2):
    return pipeline.training(data, layout, seed=SEED, start=start, prefetch=prefetch)


def global_steps(streams, layout, steps):
    """Puts the streams of all pipelines together: for each step, (batch, present) of each replica."""
    local = layout.replicas // len(streams)
    taken = [list(itertools.islice(stream, steps * local)) for stream in streams]
    assert all(len(elements) % local == 0 for elements in taken)
    return [
        [element for elements in taken for element in elements[step * local : (step + 1) * local]]
        for step in range(len(taken[0]) // local)
    ]


def layouts(batch, replicas, pipelines):
    return [Layout(batch, replicas, pipelines, p) for p in range(pipelines)]


def present_rows(step, name="id"):
    """The rows of one step that exist, in the order of the replicas."""
    rows = [
        batch[name].numpy()[slice(None) if present is None else present.numpy() == 1]
        for batch, present in step
    ]
    return np.concatenate(rows)


def all_rows(step, name="id"):
    return np.concatenate([batch[name].numpy() for batch, _ in step])


def ids(stream, batch, steps, start=0):
    """The ids of a one-replica stream's batches."""
    layout = Layout(batch, 1)
    return [present_rows(step).tolist() for step in global_steps([stream], layout, steps)][start:]


# Training.


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_batches_are_those_of_one_replica(make, kind, batch, replicas, pipelines):
    count, steps = 11, 5
    want = ids(train_stream(make(kind, count), Layout(batch, 1)), batch, steps)
    each = layouts(batch, replicas, pipelines)
    streams = [train_stream(make(kind, count), layout) for layout in each]
    found = global_steps(streams, each[0], steps)
    assert [present_rows(step).tolist() for step in found] == want
    assert all(len(rows) == batch for rows in want)
    for step in found:
        check_features_belong_together(step)
        check_shares_and_padding(step, each[0])


def check_features_belong_together(step):
    assert np.array_equal(all_rows(step, "x")[:, 0], 2 * all_rows(step) + 0.5)
    assert np.array_equal(all_rows(step, "x")[:, 1], 2 * all_rows(step) + 1.5)


def check_shares_and_padding(step, layout, size=None):
    """Each replica holds its contiguous rows, then copies of the batch's last row, masked."""
    size = layout.global_batch_size if size is None else size
    last = present_rows(step)[-1]
    for replica, (batch, present) in enumerate(step):
        rows = batch["id"].numpy()
        there = max(0, min(layout.rows, size - replica * layout.rows))
        assert len(rows) == layout.rows
        assert (rows[there:] == last).all()
        if present is None:
            assert there == layout.rows
        else:
            assert present.dtype == tf.float32
            assert present.numpy().tolist() == [1] * there + [0] * (layout.rows - there)


def test_training_takes_the_batches_that_the_sampler_says():
    source = ctl.data.arrays({"id": np.arange(11)})
    positions = tf.range(2 * 4, 5 * 4, dtype=tf.int64)
    want = sampler.shuffled(positions, count=11, seed=SEED).numpy().reshape(3, 4).tolist()
    assert ids(train_stream(source, Layout(4, 1), start=2), 4, 3) == want


def test_training_of_a_source_seeks_beyond_int32():
    source = ctl.data.arrays({"id": np.arange(11)})
    start = 2**40
    positions = tf.range(start * 4, start * 4 + 4, dtype=tf.int64)
    want = sampler.shuffled(positions, count=11, seed=SEED).numpy().tolist()
    each = Layout(4, 4)
    (step,) = global_steps([train_stream(source, each, start=start)], each, 1)
    assert present_rows(step).tolist() == want


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), LAYOUTS)
def test_there_is_a_mask_exactly_when_replicas_do_not_divide_the_batch(batch, replicas, pipelines):
    even = batch % replicas == 0
    for kind in ("source", "dataset"):
        data = tf.data.Dataset.range(9).map(lambda i: {"id": i})
        data = ctl.data.arrays({"id": range(9)}) if kind == "source" else data
        for layout in layouts(batch, replicas, pipelines):
            (_, present) = train_stream(data, layout).element_spec
            assert (not isinstance(present, tf.TensorSpec)) == even
            assert layout.even == even


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_static(make, kind, batch, replicas, pipelines):
    layout = Layout(batch, replicas, pipelines)
    for stream in (
        train_stream(make(kind, 11), layout),
        pipeline.evaluation(make(kind, 11, split="eval"), layout, prefetch=-1),
    ):
        if "train" in str(stream):  # pragma: no cover
            raise AssertionError
        features, present = stream.element_spec
        if replicas > 1 or kind == "source" or stream is not None:
            assert features["id"].shape.rank == 1
        assert features["x"].shape[1:] == [2]
        del present


def test_training_never_ends(make):
    for kind in KINDS:
        stream = train_stream(make(kind, 3), Layout(4, 2))
        assert stream.cardinality() == tf.data.INFINITE_CARDINALITY
    unknown = tf.data.Dataset.range(3).map(lambda i: {"id": i}).filter(lambda _: True)
    stream = train_stream(unknown, Layout(4, 2))
    assert stream.cardinality() == tf.data.INFINITE_CARDINALITY
