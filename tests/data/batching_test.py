"""The pipeline: the same global batches on any number of replicas, and from any step."""

import itertools
import logging

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, distribution, sampler, streams
from ctl.data.layout import Layout

SEED = 3
KINDS = ["source", "dataset", "tfrecords"]
# Global batch, replicas, pipelines: even shares, uneven ones, empty ones.
LAYOUTS = [
    (5, 1, 1),
    (8, 2, 1),
    (5, 2, 1),
    (7, 4, 1),
    (3, 4, 1),
    (8, 2, 2),
    (5, 2, 2),
    (7, 4, 2),
    (3, 4, 2),
    (130, 4, 4),
    (5, 8, 4),
]
# Examples, and the same.
EVALUATIONS = [
    (21, 5, 1, 1),
    (20, 5, 1, 1),
    (1, 1, 1, 1),
    (21, 5, 2, 1),
    (20, 4, 2, 1),
    (3, 8, 4, 1),
    (22, 7, 4, 1),
    (21, 5, 4, 2),
    (16, 4, 2, 2),
    (2, 130, 4, 4),
]


@pytest.fixture
def make(tmp_path):
    """Makes examples anew: a source, a dataset or TFRecords, the last two shuffled for training."""

    def build(kind, count, *, split="train", cache=False):
        features = {"id": np.arange(count), "x": np.arange(2.0 * count).reshape(count, 2) + 0.5}
        if kind == "source":
            return ctl.data.arrays(features)
        if kind == "dataset":
            dataset = tf.data.Dataset.from_tensor_slices(features)
            return dataset.shuffle(4, seed=SEED) if split == "train" else dataset
        shards = min(3, count) if split == "train" else 1
        for shard in range(shards):
            write_records(tmp_path / f"{split}-{shard}.tfrecord", range(shard, count, shards))
        return ctl.data.tfrecords(
            str(tmp_path / f"{split}-*.tfrecord"),
            parse_record,
            split=split,
            seed=SEED,
            tuning={"shuffle_buffer": 4, "cache": cache},
        )

    return build


def write_records(path, ids):
    if not path.exists():
        with tf.io.TFRecordWriter(str(path)) as writer:
            for i in ids:
                writer.write(str(i).encode())


def parse_record(record):
    i = tf.strings.to_number(record, tf.int64)
    return {"id": i, "x": tf.cast(tf.stack([2 * i, 2 * i + 1]), tf.float64) + 0.5}


def numbers(count):
    """A dataset that is not shuffled."""
    return tf.data.Dataset.range(count).map(lambda i: {"id": i})


def training(data, layout, *, start=0, prefetch=2):
    stream = batching.training(data, layout, seed=SEED, start=start, prefetch=prefetch)
    return distribution.disable_autotune(stream)


def evaluation(data, layout):
    return distribution.disable_autotune(batching.evaluation(data, layout, prefetch=2))


def layouts(batch, replicas, pipelines):
    """The layouts of all pipelines."""
    return [Layout(batch, replicas, pipelines, p) for p in range(pipelines)]


def take_steps(streams, layout, steps):
    """Puts the streams of all pipelines together: for each step, every replica's element."""
    local = layout.local_replicas
    taken = [list(itertools.islice(stream, steps * local)) for stream in streams]
    return [
        [element for elements in taken for element in elements[step * local : (step + 1) * local]]
        for step in range(steps)
    ]


def present_ids(step):
    """The ids of the rows that exist, in the order of the replicas."""
    masks = [np.ones(len(b["id"])) if p is None else p.numpy() for b, p in step]
    return [i for (b, _), mask in zip(step, masks, strict=True) for i in b["id"].numpy()[mask == 1]]


def one_replica_ids(data, batch, steps, start=0):
    """What one replica's training stream gives: a list of ids for each step."""
    layout = Layout(batch, 1)
    found = take_steps([training(data, layout, start=start)], layout, steps)
    return [present_ids(step) for step in found]


def check_shares_and_padding(step, layout, size):
    """Each replica holds its contiguous rows, then copies of the batch's last row, masked."""
    last = present_ids(step)[-1]
    for replica, (batch, present) in enumerate(step):
        found = batch["id"].numpy()
        there = max(0, min(layout.rows, size - replica * layout.rows))
        assert len(found) == layout.rows
        assert (found[there:] == last).all()
        if present is None:
            assert there == layout.rows
        else:
            assert present.dtype == tf.float32
            assert present.numpy().tolist() == [1] * there + [0] * (layout.rows - there)
        assert np.array_equal(batch["x"], np.stack([2 * found + 0.5, 2 * found + 1.5], axis=1))


# Training.


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_batches_are_those_of_one_replica(make, kind, batch, replicas, pipelines):
    count, steps = 11, 4
    want = one_replica_ids(make(kind, count), batch, steps)
    assert [len(ids) for ids in want] == [batch] * steps
    each = layouts(batch, replicas, pipelines)
    found = take_steps([training(make(kind, count), one) for one in each], each[0], steps)
    assert [present_ids(step) for step in found] == want
    for step in found:
        check_shares_and_padding(step, each[0], batch)


class Read(ctl.data.Source):
    """A person's own source, which is asked for a batch a call."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def gather(self, indexes):
        x = tf.cast(tf.stack([2 * indexes, 2 * indexes + 1], axis=1), tf.float64) + 0.5
        return {"id": indexes, "x": x}


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), [(5, 1, 1), (7, 4, 2)])
def test_how_many_batches_a_call_draws_changes_nothing(
    make, monkeypatch, batch, replicas, pipelines
):
    """Also where a call ends between two replicas' shares of one batch."""
    count, steps, start = 11, 9, 3
    whole = one_replica_ids(Read(count), batch, start + steps)
    each = layouts(batch, replicas, pipelines)
    for most in (1, 3, 16):
        monkeypatch.setattr(streams, "MOST_AT_ONCE", most)
        source = make("source", count)
        found = take_steps([training(source, one, start=start) for one in each], each[0], steps)
        assert [present_ids(step) for step in found] == whole[start:]
        for step in found:
            check_shares_and_padding(step, each[0], batch)


def test_examples_of_another_size_are_drawn_fewer_at_once():
    drawn = {}
    for row in (1, 2**10, 2**20):
        source = ctl.data.arrays({"x": np.zeros([20, row], np.uint8)})
        drawn[row] = streams.at_once(source, Layout(64, 1))
    assert drawn == {1: 16, 2**10: 16, 2**20: 1}
    assert streams.at_once(Read(20), Layout(64, 1)) == 1


@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_from_any_step_is_the_tail_of_the_undisturbed_stream(make, kind, cache):
    count, batch, steps = 11, 4, 12
    whole = one_replica_ids(make(kind, count, cache=cache), batch, steps)
    epochs = np.reshape(np.concatenate(whole)[: 4 * count], [4, count])
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 4
    each = Layout(batch, 2)
    for start in (1, 3, 7):
        data = make(kind, count, cache=cache)
        found = take_steps([training(data, each, start=start)], each, steps - start)
        assert [present_ids(step) for step in found] == whole[start:]


def test_training_on_a_source_takes_the_batches_that_the_sampler_says():
    source = ctl.data.arrays({"id": range(11)})
    for start in (0, 2, 2**40):
        positions = tf.range(start * 4, start * 4 + 12, dtype=tf.int64)
        want = (
            sampler.shuffled(positions, count=11, seed=SEED, span=12).numpy().reshape(3, 4).tolist()
        )
        assert one_replica_ids(source, 4, 3, start=start) == want


def test_training_on_a_dataset_keeps_its_order_and_runs_on_across_epochs():
    want = [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert one_replica_ids(numbers(5), 4, 3) == want
    assert one_replica_ids(numbers(5).repeat(), 4, 3) == want
    assert one_replica_ids(numbers(5).filter(lambda _: True), 4, 3) == want
    assert one_replica_ids(numbers(3), 8, 1) == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("prefetch", [-1, 0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_prefetching_changes_nothing(make, kind, prefetch):
    layout = Layout(5, 2)
    found = take_steps([training(make(kind, 11), layout, prefetch=prefetch)], layout, 4)
    assert [present_ids(step) for step in found] == one_replica_ids(make(kind, 11), 5, 4)


@pytest.mark.parametrize("kind", [*KINDS, "unknown length"])
def test_training_is_known_to_be_endless(make, kind):
    data = numbers(3).filter(lambda _: True) if kind == "unknown length" else make(kind, 3)
    for layout in (Layout(4, 1), Layout(4, 2)):
        assert training(data, layout).cardinality() == tf.data.INFINITE_CARDINALITY


def test_a_dataset_that_is_read_again_to_resume_says_so(make, caplog):
    with caplog.at_level(logging.WARNING, "ctl"):
        training(make("source", 3), Layout(4, 2), start=7)
        training(make("dataset", 3), Layout(4, 2), start=0)
        assert not caplog.messages
        training(make("dataset", 3), Layout(4, 2), start=7)
    (message,) = caplog.messages
    assert "step 7" in message
    assert "\n" not in message


# Shapes.


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_has_static_shapes_and_a_mask_only_where_it_is_needed(
    make, kind, batch, replicas, pipelines
):
    layout = Layout(batch, replicas, pipelines)
    features, present = training(make(kind, 11), layout).element_spec
    assert features["id"].shape == [layout.rows]
    assert features["x"].shape == [layout.rows, 2]
    if batch % replicas:
        assert present == tf.TensorSpec([layout.rows], tf.float32)
    else:
        assert not isinstance(present, tf.TensorSpec)


@pytest.mark.parametrize(("count", "batch", "replicas", "pipelines"), EVALUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_has_static_shapes_and_always_a_mask(
    make, kind, count, batch, replicas, pipelines
):
    layout = Layout(batch, replicas, pipelines)
    features, present = evaluation(make(kind, count, split="eval"), layout).element_spec
    assert features["id"].shape == [layout.rows]
    assert features["x"].shape == [layout.rows, 2]
    assert present == tf.TensorSpec([layout.rows], tf.float32)


def test_a_layout_says_who_holds_what():
    assert Layout(5, 2).shares() == [3, 2]
    assert Layout(7, 4).shares() == [2, 2, 2, 1]
    assert Layout(3, 4).shares() == [1, 1, 1, 0]
    assert Layout(130, 4).shares() == [33, 33, 33, 31]
    assert Layout(5, 8).shares() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert Layout(8, 4).even
    assert not Layout(3, 4).even
    context = tf.distribute.InputContext(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
    )
    assert Layout.of(context, 7) == Layout(7, replicas=4, pipelines=2, pipeline=1)
    assert Layout.of(context, 7).first_replica == 2


def test_a_global_batch_of_nothing_is_refused():
    with pytest.raises(ctl.UsageError, match="global_batch_size is 0, want at least 1"):
        Layout(0, 1)


# Evaluation.


@pytest.mark.parametrize(("count", "batch", "replicas", "pipelines"), EVALUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_each_example_once_and_in_order(
    make, kind, count, batch, replicas, pipelines
):
    data = make(kind, count, split="eval")
    each = layouts(batch, replicas, pipelines)
    steps = -(-count // batch)
    found = take_steps([evaluation(data, one) for one in each], each[0], steps)
    assert [i for step in found for i in present_ids(step)] == list(range(count))
    for number, step in enumerate(found):
        check_shares_and_padding(step, each[0], min(batch, count - number * batch))


@pytest.mark.parametrize(("count", "batch", "replicas", "pipelines"), EVALUATIONS)
@pytest.mark.parametrize("kind", ["source", "dataset"])
def test_evaluation_steps_are_what_it_takes(make, kind, count, batch, replicas, pipelines):
    layout = Layout(batch, replicas, pipelines)
    data = make(kind, count, split="eval")
    assert batching.evaluation_steps(data, layout) == -(-count // batch)


@pytest.mark.parametrize("count", [20, 21])
def test_evaluation_of_a_source_goes_on_with_absent_rows(make, count):
    layout = Layout(5, 1)
    found = take_steps([evaluation(make("source", count), layout)], layout, 8)
    assert [i for step in found for i in present_ids(step)] == list(range(count))


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), [(5, 1, 1), (5, 2, 1), (5, 4, 2)])
def test_evaluation_of_a_dataset_of_unknown_length_goes_to_its_end(batch, replicas, pipelines):
    data = numbers(30).filter(lambda example: example["id"] % 10 < 7)
    each = layouts(batch, replicas, pipelines)
    assert batching.evaluation_steps(data, each[0]) is None
    streams = [list(evaluation(data, one)) for one in each]
    assert {len(stream) for stream in streams} == {5 * each[0].local_replicas}
    found = take_steps(streams, each[0], 5)
    ids = [i for step in found for i in present_ids(step)]
    assert ids == [i for i in range(30) if i % 10 < 7]


def test_an_evaluation_dataset_may_be_read_again(make):
    stream = evaluation(make("dataset", 7, split="eval"), Layout(4, 1))
    twice = [[present_ids([element]) for element in stream] for _ in range(2)]
    assert twice == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


@pytest.mark.parametrize("wrap", [lambda d: d, ctl.data.PerReplica, ctl.data.GlobalBatches])
def test_an_evaluation_without_an_end_is_refused(wrap):
    with pytest.raises(ctl.UsageError, match="never ends: return one without repeat") as caught:
        batching.evaluation_steps(wrap(numbers(3).repeat()), Layout(2, 1))
    assert "\n" not in str(caught.value)


# What build_dataset may return.


class Squares(ctl.data.Source):
    """A source that computes its examples."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def gather(self, indexes):
        return {"x": tf.cast(indexes, tf.float32)[:, tf.newaxis], "label": indexes**2}


def two_features(count):
    return tf.data.Dataset.range(count).map(lambda i: {"x": tf.ones([1]), "label": i})


@pytest.mark.parametrize(
    "make_data",
    [
        lambda: Squares(3),
        lambda: two_features(3),
        lambda: ctl.data.PerReplica(two_features(8).batch(4)),
        lambda: ctl.data.GlobalBatches(two_features(8).batch(4, drop_remainder=True)),
    ],
    ids=["source", "dataset", "per replica", "global batches"],
)
def test_the_spec_of_a_batch_has_any_number_of_rows(make_data):
    batching.check_data(make_data(), "train")
    assert batching.element_spec(make_data()) == {
        "x": tf.TensorSpec([None, 1], tf.float32),
        "label": tf.TensorSpec([None], tf.int64),
    }


class Pairs(Squares):
    def gather(self, indexes):
        return indexes, indexes


class Nothing(Squares):
    def gather(self, indexes):
        return {}


class Totals(Squares):
    def gather(self, indexes):
        return {"x": tf.reduce_sum(indexes)}


def unknown_rank():
    return example(b"").map(lambda file: {"image": tf.io.decode_image(file)})


def sparse():
    features = {"x": tf.io.VarLenFeature(tf.int64)}
    return example(b"").map(lambda record: tf.io.parse_single_example(record, features))


def example(value):
    """A dataset of one element."""
    return tf.data.Dataset.from_tensors(value)


REFUSED = {
    "nothing": (lambda: None, "returned NoneType: want a ctl.data.Source"),
    "arrays": (lambda: (np.zeros(3), np.zeros(3)), "returned tuple: want a ctl.data.Source"),
    "a dict": (lambda: {"x": np.zeros(3)}, "returned dict: want a ctl.data.Source"),
    "a class": (lambda: Squares, "want a ctl.data.Source"),
    "no examples": (lambda: numbers(0), "no examples: want at least one"),
    "a source without examples": (lambda: Squares(0), "no examples: want at least one"),
    "no batches": (lambda: ctl.data.GlobalBatches(numbers(0).batch(2)), "no examples"),
    "numbers": (lambda: tf.data.Dataset.range(3), "want dicts"),
    "pairs": (lambda: example((1, 2)), "want dicts, as from `dataset.map("),
    "batches of pairs": (lambda: ctl.data.PerReplica(example((1, 2)).batch(2)), "want dicts"),
    "a source of pairs": (lambda: Pairs(3), "want dicts"),
    "a source of nothing": (lambda: Nothing(3), "want dicts"),
    "a source of totals": (lambda: Totals(3), "their first axis the rows"),
    "batches without rows": (lambda: ctl.data.GlobalBatches(numbers(3)), "first axis the rows"),
    "unknown rank": (unknown_rank, "known rank (tf.ensure_shape"),
    "sparse tensors": (sparse, "want dense tensors"),
}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(("make_data", "words"), REFUSED.values(), ids=REFUSED)
def test_what_build_dataset_may_not_return_is_refused_in_one_line(make_data, words, split):
    with pytest.raises(ctl.UsageError) as caught:
        batching.check_data(make_data(), split)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
