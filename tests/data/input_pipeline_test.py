"""InputPipeline: from `build_dataset` to what the replicas get."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.data.input_pipeline import InputPipeline
from tests.data.reading import numbers

# What build_dataset may return, with twelve examples each.
KINDS = {
    "source": lambda: ctl.data.arrays({"id": range(12)}),
    "dataset": lambda: numbers(12),
    "dataset of unknown length": lambda: numbers(12).filter(lambda _: True),
    "global batches": lambda: ctl.data.GlobalBatches(numbers(12).batch(8)),
    "per replica": lambda: ctl.data.PerReplica(numbers(12).batch(4)),
}


def make_pipeline(strategy, data_factory):
    """A pipeline, and the list of the splits for which it called `build_dataset`."""
    calls = []

    def build_dataset(split, input_context):
        assert isinstance(input_context, tf.distribute.InputContext)
        calls.append(split)
        return data_factory()

    return InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2), calls


def ids_of_steps(strategy, dataset, count):
    """The ids of each step in the order of the replicas, without padding."""
    result, iterator = [], iter(dataset)
    for _ in range(count):
        element = next(iterator)
        batch, row_mask = element if isinstance(element, tuple) else (element, None)
        ids = np.concatenate(strategy.experimental_local_results(batch["id"]))
        masks = [m for m in strategy.experimental_local_results(row_mask) if m is not None]
        result.append(ids[np.concatenate(masks) == 1].tolist() if masks else ids.tolist())
    return result


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reads_each_example_once(kind, replicas):
    replicated = testing.make_strategy(replicas)
    pipeline, _ = make_pipeline(replicated, KINDS[kind])
    steps = pipeline.evaluation_steps(8)
    assert steps == (2 if kind in ("source", "dataset") else None)
    batches = 3 if (kind, replicas) == ("per replica", 1) else 2
    ids = ids_of_steps(replicated, pipeline.evaluation_dataset(8), batches)
    assert np.concatenate(ids).tolist() == list(range(12))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["source", "shuffled dataset"])
def test_training_data_is_the_same_on_any_replicas_and_from_any_step(kind, replicas):
    def make():
        return KINDS["source"]() if kind == "source" else numbers(12).shuffle(5, seed=1)

    one, replicated = testing.make_strategy(1), testing.make_strategy(replicas)
    expected = ids_of_steps(one, make_pipeline(one, make)[0].training_dataset(5, start=0), 6)
    pipeline, _ = make_pipeline(replicated, make)
    for start in (0, 4, 2, 2):  # back and forth in one process, as a rollback does
        ids = ids_of_steps(replicated, pipeline.training_dataset(5, start=start), 6 - start)
        assert ids == expected[start:]


def test_source_is_built_once_per_split_and_dataset_each_time():
    pipeline, calls = make_pipeline(testing.make_strategy(1), KINDS["source"])
    for _ in range(3):
        pipeline.training_dataset(4, start=0)
    pipeline.evaluation_dataset(4)
    assert calls == ["train", "eval"]
    pipeline, calls = make_pipeline(testing.make_strategy(1), KINDS["dataset"])
    pipeline.training_dataset(4, start=0)
    before = len(calls)
    pipeline.training_dataset(4, start=1)
    assert len(calls) > before


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_dataset_that_its_author_shards_by_the_context_loses_no_example(replicas):
    strategy = testing.make_strategy(replicas)

    def build_dataset(split, context):
        return numbers(12).shard(context.num_input_pipelines, context.input_pipeline_id)

    pipeline = InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2)
    for dataset in (pipeline.training_dataset(4, start=0), pipeline.evaluation_dataset(4)):
        assert np.concatenate(ids_of_steps(strategy, dataset, 3)).tolist() == list(range(12))


@pytest.mark.parametrize("kind", ["dataset", "per replica"])
def test_only_the_author_of_per_replica_data_gets_the_context_of_each_pipeline(kind):
    contexts = []

    def build_dataset(split, context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id))
        return KINDS[kind]()

    strategy = testing.make_strategy(2)
    pipeline = InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2)
    context = tf.distribute.InputContext(2, 1, num_replicas_in_sync=2)
    pipeline.data("train", context)
    assert contexts == [(1, 0)] + [(2, 1)] * (kind == "per replica")


def test_unsupported_data_is_rejected():
    pipeline, _ = make_pipeline(testing.make_strategy(1), lambda: [1, 2])
    with pytest.raises(ctl.UsageError, match="returned list, but must return"):
        pipeline.training_dataset(4, start=0)
