"""What each replica of a real strategy gets, inside a tf.function as in training."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, distribution
from ctl.data.layout import Layout


def numbers(count):
    """A dataset of examples that are told apart by their id."""
    return tf.data.Dataset.range(count).map(lambda i: {"id": i})


def training(kind, layout):
    """The training stream of eleven examples."""
    shuffled = numbers(11).shuffle(4, seed=3)
    data = ctl.data.arrays({"id": range(11)}) if kind == "source" else shuffled
    return batching.training(data, layout, seed=3, start=0, prefetch=2)


def evaluation(data, layout):
    return batching.evaluation(data, layout, prefetch=2)


def steps(strategy, dataset, count=None):
    """For each step the ids of every replica, and the masks."""
    iterator = iter(dataset)

    @tf.function
    def take():
        return next(iterator)

    def values(tensors):
        local = strategy.experimental_local_results(tensors)
        return [value if value is None else value.numpy().tolist() for value in local]

    found = []
    while count is None or len(found) < count:
        try:
            element = take()
        except tf.errors.OutOfRangeError:
            break
        batch, present = element if isinstance(element, tuple) else (element, None)
        found.append((values(batch["id"]), values(present)))
    return found


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("batch", [8, 5, 3])
@pytest.mark.parametrize("kind", ["source", "dataset"])
def test_each_replica_gets_its_contiguous_rows(strategy, kind, batch, replicas):
    chosen = strategy(replicas)
    dataset = distribution.from_function(
        chosen, lambda context: training(kind, Layout.of(context, batch))
    )
    found = steps(chosen, dataset, count=3)
    whole = distribution.disable_autotune(training(kind, Layout(batch, 1)).take(3))
    rows = -(-batch // replicas)
    for (global_batch, _), (shares, masks) in zip(whole, found, strict=True):
        ids = global_batch["id"].numpy().tolist()
        padded = ids + ids[-1:] * (rows * replicas - batch)
        assert shares == [padded[r * rows : (r + 1) * rows] for r in range(replicas)]
        if batch % replicas:
            assert np.concatenate(masks).tolist() == [1] * batch + [0] * (len(padded) - batch)
        else:
            assert all(mask is None for mask in masks)


@pytest.mark.parametrize("kind", ["source", "dataset"])
@pytest.mark.parametrize(("batch", "replicas"), [(5, 2), (3, 4)])
def test_the_strategys_own_way_gives_every_replica_the_same(strategy, kind, batch, replicas):
    chosen = strategy(replicas)

    def stream(context):
        return training(kind, Layout.of(context, batch))

    theirs = chosen.distribute_datasets_from_function(stream)
    ours = distribution.from_function(chosen, stream)
    assert steps(chosen, theirs, count=3) == steps(chosen, ours, count=3)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("known", [True, False])
def test_replicas_meet_the_end_of_an_evaluation_together(strategy, replicas, known):
    chosen = strategy(replicas)
    data = numbers(21) if known else numbers(21).filter(lambda _: True)
    dataset = distribution.from_function(
        chosen, lambda context: evaluation(data, Layout.of(context, 5))
    )
    found = steps(chosen, dataset)
    assert len(found) == 5
    ids = np.concatenate([share for shares, _ in found for share in shares])
    present = np.concatenate([mask for _, masks in found for mask in masks])
    assert ids[present == 1].tolist() == list(range(21))


def test_an_evaluation_can_be_iterated_again(strategy):
    chosen = strategy(2)
    data = ctl.data.arrays({"id": range(21)})
    dataset = distribution.from_function(
        chosen, lambda context: evaluation(data, Layout.of(context, 5))
    )
    assert steps(chosen, dataset, count=5) == steps(chosen, dataset, count=5)


@pytest.mark.parametrize(
    ("replicas", "want"),
    [
        (1, [[[0, 1, 2, 3, 4, 5, 6]], [[7, 8, 9]]]),
        (2, [[[0, 1, 2, 3], [4, 5, 6]], [[7, 8], [9]]]),
        (4, [[[0, 1], [2, 3], [4, 5], [6]], [[7], [8], [9], []]]),
    ],
)
def test_ready_global_batches_are_split_over_the_replicas(strategy, replicas, want):
    data = ctl.data.GlobalBatches(numbers(10).batch(7))
    chosen = strategy(replicas)

    def shares(count=None, **arguments):
        batches = batching.global_batches(data, **arguments)
        dataset = distribution.global_batches(chosen, batches)
        return [ids for ids, _ in steps(chosen, dataset, count)]

    assert shares(start=0, endless=False) == want
    assert shares(count=3, start=3, endless=True) == [want[1], want[0], want[1]]
    assert batching.evaluation_steps(data, Layout(7, replicas)) is None


def test_a_strategy_that_has_fed_a_source_feeds_the_other_kinds_as_before(strategy, tmp_path):
    files = [str(tmp_path / name) for name in "ab"]
    for number, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            for i in range(6):
                writer.write(str(10 * number + i).encode())

    def batches(size):
        records = tf.data.Dataset.from_tensor_slices(files).flat_map(tf.data.TFRecordDataset)
        return records.map(lambda r: {"id": tf.strings.to_number(r, tf.int64)}).batch(size)

    chosen = strategy(2)
    source = ctl.data.arrays({"id": range(5)})
    distribution.from_function(chosen, lambda context: evaluation(source, Layout.of(context, 4)))
    want = [[[0, 1], [2, 3]], [[4, 5], [10, 11]], [[12, 13], [14, 15]]]
    ready = steps(chosen, distribution.global_batches(chosen, batches(4)))
    assert [ids for ids, _ in ready] == want
    data = ctl.data.PerReplica(batches(2))
    assert per_replica(chosen, lambda layout: evaluation(data, layout)) == want


def per_replica(strategy, make_stream, count=None):
    """What two replicas get of batches that were made for one of them."""
    dataset = distribution.from_function(
        strategy, lambda context: make_stream(Layout.of(context, 6)), per_worker=True
    )
    return [ids for ids, _ in steps(strategy, dataset, count)]


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_ready_batches_of_a_replica_go_to_one_replica_after_the_other(strategy, drop_remainder):
    data = ctl.data.PerReplica(numbers(12).batch(3, drop_remainder=drop_remainder))

    def resumed(layout):
        return batching.training(data, layout, seed=0, start=3, prefetch=2)

    want = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert per_replica(strategy(2), lambda layout: evaluation(data, layout)) == want
    assert per_replica(strategy(2), resumed, count=2) == want[::-1]
    assert batching.evaluation_steps(data, Layout(6, 2)) is None


def test_the_last_ready_batch_of_an_evaluation_may_leave_replicas_without_rows(strategy):
    data = ctl.data.PerReplica(numbers(8).batch(3))
    found = per_replica(strategy(2), lambda layout: evaluation(data, layout))
    assert found == [[[0, 1, 2], [3, 4, 5]], [[6, 7], []]]


def test_ready_batches_that_would_be_dropped_from_an_evaluation_are_refused():
    data = ctl.data.PerReplica(numbers(9).batch(3, drop_remainder=True))
    with pytest.raises(ctl.UsageError, match=r"1 batches for 2 replicas.*drop_remainder") as caught:
        evaluation(data, Layout(6, 2))
    assert "\n" not in str(caught.value)


def test_a_dataset_keeps_its_authors_choice_about_tuning():
    options = tf.data.Options()
    options.autotune.enabled = True
    tuned = numbers(3).with_options(options)
    assert distribution.disable_autotune(tuned).options().autotune.enabled is True
    assert distribution.disable_autotune(numbers(3)).options().autotune.enabled is False
