"""From build_dataset to what the replicas get."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.input_pipeline import InputPipeline


def numbers(count):
    return tf.data.Dataset.range(count).map(lambda i: {"id": i})


# What build_dataset may return, twelve examples each.
KINDS = {
    "source": lambda: ctl.data.arrays({"id": range(12)}),
    "dataset": lambda: numbers(12),
    "dataset of unknown length": lambda: numbers(12).filter(lambda _: True),
    "global batches": lambda: ctl.data.GlobalBatches(numbers(12).batch(8)),
    "per replica": lambda: ctl.data.PerReplica(numbers(12).batch(4)),
}


def feed(strategy, data_factory):
    """A feed, and the list of the splits that it asked for."""
    asked = []

    def build_dataset(split, input_context):
        assert isinstance(input_context, tf.distribute.InputContext)
        asked.append(split)
        return data_factory()

    return InputPipeline(build_dataset, strategy=strategy, seed=0, prefetch=2), asked


def ids_of_steps(strategy, dataset, count):
    """The ids of the rows that exist, in the order of the replicas, for each of some steps."""
    found, iterator = [], iter(dataset)
    for _ in range(count):
        element = next(iterator)
        batch, present = element if isinstance(element, tuple) else (element, None)
        ids = np.concatenate(strategy.experimental_local_results(batch["id"]))
        masks = [m for m in strategy.experimental_local_results(present) if m is not None]
        found.append(ids[np.concatenate(masks) == 1].tolist() if masks else ids.tolist())
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_each_example_once(strategy, kind, replicas):
    chosen = strategy(replicas)
    subject, _ = feed(chosen, KINDS[kind])
    steps = subject.evaluation_steps(8)
    assert steps == (2 if kind in ("source", "dataset") else None)
    batches = 3 if (kind, replicas) == ("per replica", 1) else 2
    found = ids_of_steps(chosen, subject.evaluation(8), batches)
    assert np.concatenate(found).tolist() == list(range(12))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["source", "shuffled dataset"])
def test_training_is_the_same_on_any_replicas_and_from_any_step(strategy, kind, replicas):
    def make():
        return KINDS["source"]() if kind == "source" else numbers(12).shuffle(5, seed=1)

    one, chosen = strategy(1), strategy(replicas)
    want = ids_of_steps(one, feed(one, make)[0].training(5, start=0), 6)
    subject, _ = feed(chosen, make)
    for start in (0, 4, 2, 2):  # back and forth in one process, as a rollback does
        found = ids_of_steps(chosen, subject.training(5, start=start), 6 - start)
        assert found == want[start:]


def test_a_source_is_made_once_a_split_and_a_dataset_anew(strategy):
    subject, asked = feed(strategy(1), KINDS["source"])
    for _ in range(3):
        subject.training(4, start=0)
    subject.evaluation(4)
    assert asked == ["train", "eval"]
    subject, asked = feed(strategy(1), KINDS["dataset"])
    subject.training(4, start=0)
    before = len(asked)
    subject.training(4, start=1)
    assert len(asked) > before


def test_what_build_dataset_may_not_return_is_refused(strategy):
    subject, _ = feed(strategy(1), lambda: [1, 2])
    with pytest.raises(ctl.UsageError, match="returned list: want"):
        subject.training(4, start=0)
