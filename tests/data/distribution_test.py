"""What each replica of a strategy gets, read inside a tf.function as in training; InputPipeline."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.data import distribution
from ctl.data.input_pipeline import InputPipeline
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from tests.data import record_files
from tests.data.reading import numbers, one_line


def evaluation(data, layout):
    return kind_of(data).evaluation(layout, prefetch=2)


def steps(strategy, dataset, count=None):
    """For each step, the ids and the mask of every replica."""
    iterator = iter(dataset)

    @tf.function
    def take():
        return next(iterator)

    def values(tensors):
        local = strategy.experimental_local_results(tensors)
        return [value if value is None else value.numpy().tolist() for value in local]

    result = []
    while count is None or len(result) < count:
        try:
            element = take()
        except tf.errors.OutOfRangeError:
            break
        batch, row_mask = element if isinstance(element, tuple) else (element, None)
        result.append((values(batch["id"]), values(row_mask)))
    return result


def test_global_batches_are_split_over_the_replicas():
    data = ctl.data.GlobalBatches(numbers(10).batch(7))
    replicated, layout = testing.make_strategy(4), Layout(7, 4)
    expected = [[[0, 1], [2, 3], [4, 5], [6]], [[7], [8], [9], []]]

    def read(batches, count=None):
        dataset = distribution.global_batches(replicated, batches)
        return [ids for ids, _ in steps(replicated, dataset, count)]

    assert read(kind_of(data).evaluation(layout, prefetch=0)) == expected
    resumed = read(kind_of(data).training(layout, seed=0, start=3, prefetch=0), count=3)
    assert resumed == [expected[1], expected[0], expected[1]]
    assert kind_of(data).steps(layout) is None


def test_distributing_a_source_does_not_change_how_later_datasets_are_distributed(tmp_path):
    files = [record_files.write(tmp_path / f"{i}", range(10 * i, 10 * i + 6)) for i in range(2)]

    def batches(size):
        records = tf.data.Dataset.from_tensor_slices(files).flat_map(tf.data.TFRecordDataset)
        parse = lambda r: tf.io.parse_single_example(r, record_files.FEATURES)  # noqa: E731
        return records.map(parse).batch(size)

    replicated = testing.make_strategy(2)
    source = ctl.data.arrays({"id": range(5)})
    distribution.from_function(
        replicated, lambda context: evaluation(source, Layout.from_context(context, 4))
    )
    expected = [[[0, 1], [2, 3]], [[4, 5], [10, 11]], [[12, 13], [14, 15]]]
    read = steps(replicated, distribution.global_batches(replicated, batches(4)))
    assert [ids for ids, _ in read] == expected
    data = ctl.data.PerReplica(batches(2))
    assert per_replica(replicated, lambda layout: evaluation(data, layout)) == expected


def per_replica(strategy, make_stream, count=None):
    """The ids that two replicas get from a dataset of per-replica batches."""
    dataset = distribution.from_function(
        strategy, lambda context: make_stream(Layout.from_context(context, 6)), per_worker=True
    )
    return [ids for ids, _ in steps(strategy, dataset, count)]


def test_per_replica_batches_go_to_consecutive_replicas():
    data = ctl.data.PerReplica(numbers(12).batch(3))

    def resumed(layout):
        return kind_of(data).training(layout, seed=0, start=3, prefetch=2)

    strategy = testing.make_strategy(2)
    expected = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert per_replica(strategy, lambda layout: evaluation(data, layout)) == expected
    assert per_replica(strategy, resumed, count=2) == expected[::-1]
    assert kind_of(data).steps(Layout(6, 2)) is None


def test_per_replica_batches_that_would_be_dropped_from_an_evaluation_are_rejected():
    data = ctl.data.PerReplica(numbers(9).batch(3, drop_remainder=True))
    message = one_line(evaluation, data, Layout(6, 2))
    assert "1 batches for 2 replicas" in message and "drop_remainder" in message


def test_explicit_autotune_option_of_a_dataset_is_kept():
    options = tf.data.Options()
    options.autotune.enabled = True
    for dataset, enabled in ((numbers(3).with_options(options), True), (numbers(3), False)):
        assert distribution.disable_autotune(dataset).options().autotune.enabled is enabled


# InputPipeline: from `build_dataset` to what the replicas get.


# What build_dataset may return, with twelve examples each.
KINDS = {
    "source": lambda: ctl.data.arrays({"id": range(12)}),
    "dataset": lambda: numbers(12),
    "dataset of unknown length": lambda: numbers(12).filter(lambda _: True),
    "global batches": lambda: ctl.data.GlobalBatches(numbers(12).batch(8)),
    "per replica": lambda: ctl.data.PerReplica(numbers(12).batch(4)),
}


def make_pipeline(strategy, data_factory):
    """A pipeline, and the list of the splits and contexts for which it called `build_dataset`."""
    calls = []

    def build_dataset(split, context):
        calls.append((split, context.num_input_pipelines, context.input_pipeline_id))
        return data_factory()

    return InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2), calls


def ids_of_steps(strategy, dataset, count):
    """The ids of each step in the order of the replicas, without padding."""
    result = []
    for ids, masks in steps(strategy, dataset, count):
        flat = np.concatenate(ids)
        has_mask = masks is not None and masks[0] is not None
        result.append(flat[np.concatenate(masks) == 1 if has_mask else ...].tolist())
    return result


@pytest.mark.parametrize(
    ("kind", "replicas", "batches"),
    [
        ("source", 1, 3),
        *((kind, 4, 3) for kind in ("source", "dataset", "dataset of unknown length")),
        ("global batches", 2, 2),
        ("per replica", 1, 3),
        ("per replica", 2, 2),
    ],
)
def test_evaluation_reads_each_example_once_and_ends_on_all_replicas_in_the_same_step(
    kind, replicas, batches
):
    replicated = testing.make_strategy(replicas)
    pipeline, _ = make_pipeline(replicated, KINDS[kind])
    assert pipeline.evaluation_steps(5) == (3 if kind in ("source", "dataset") else None)
    dataset = pipeline.evaluation_dataset(5)
    for _ in range(2 if kind == "source" else 1):
        # The dataset of a source has no end: it begins again.
        ids = ids_of_steps(replicated, dataset, batches if kind == "source" else None)
        assert len(ids) == batches and np.concatenate(ids).tolist() == list(range(12))


@pytest.mark.parametrize(
    ("make", "batch", "replicas"),
    [(KINDS["source"], 5, 4), (lambda: numbers(12).shuffle(5, seed=1), 8, 2)],
)
def test_replicas_get_the_contiguous_rows_of_one_replica_from_any_step(make, batch, replicas):
    one, replicated = testing.make_strategy(1), testing.make_strategy(replicas)
    expected = ids_of_steps(one, make_pipeline(one, make)[0].training_dataset(batch, start=0), 5)
    pipeline, _ = make_pipeline(replicated, make)
    rows = -(-batch // replicas)
    padding = rows * replicas - batch
    mask = [1] * batch + [0] * padding
    parts = [slice(r * rows, (r + 1) * rows) for r in range(replicas)]
    for start in (0, 4, 2):  # back and forth in one process, as a rollback does
        read = steps(replicated, pipeline.training_dataset(batch, start=start), 5 - start)
        for ids, (per_replica_ids, masks) in zip(expected[start:], read, strict=True):
            padded = ids + ids[-1:] * padding
            assert per_replica_ids == [padded[part] for part in parts]
            assert masks == [mask[part] if padding else None for part in parts]


def test_source_is_built_once_per_split_and_dataset_each_time():
    pipeline, calls = make_pipeline(testing.make_strategy(1), KINDS["source"])
    for _ in range(3):
        pipeline.training_dataset(4, start=0)
    pipeline.evaluation_dataset(4)
    assert calls == [("train", 1, 0), ("eval", 1, 0)]
    pipeline, calls = make_pipeline(testing.make_strategy(1), KINDS["dataset"])
    pipeline.training_dataset(4, start=0)
    before = len(calls)
    pipeline.training_dataset(4, start=1)
    assert len(calls) > before


def test_dataset_that_its_author_shards_by_the_context_loses_no_example():
    strategy = testing.make_strategy(4)

    def build_dataset(split, context):
        return numbers(12).shard(context.num_input_pipelines, context.input_pipeline_id)

    pipeline = InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2)
    for dataset in (pipeline.training_dataset(4, start=0), pipeline.evaluation_dataset(4)):
        assert np.concatenate(ids_of_steps(strategy, dataset, 3)).tolist() == list(range(12))


@pytest.mark.parametrize("kind", ["dataset", "per replica"])
def test_only_the_author_of_per_replica_data_gets_the_context_of_each_pipeline(kind):
    pipeline, calls = make_pipeline(testing.make_strategy(2), KINDS[kind])
    pipeline.data("train", tf.distribute.InputContext(2, 1, num_replicas_in_sync=2))
    assert calls == [("train", 1, 0)] + [("train", 2, 1)] * (kind == "per replica")
