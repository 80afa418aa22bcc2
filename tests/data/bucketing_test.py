"""ctl.data.bucketed: batches of sequences of similar length."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.kinds import kind_of
from tests.data import token_model
from tests.data.reading import one_line, pipeline_layouts, read_batches, read_rows, read_steps

BOUNDARIES = [4, 8, 12]


@functools.cache
def in_memory():
    return ctl.data.bucketed(ctl.data.sequences(token_model.documents()), BOUNDARIES)


def parsed():
    return ctl.data.bucketed(token_model.Documents(), BOUNDARIES)


def numbered(lengths, boundaries):
    """Sequences whose tokens are the number of their example."""
    tokens = [[i] * n for i, n in enumerate(lengths)]
    sequences = ctl.data.sequences({"x": tokens, "id": np.arange(len(lengths))})
    return ctl.data.bucketed(sequences, boundaries)


def order(source, start, steps, batch, *, seed=3):
    """The index and the seed of each row, computed in one call."""
    positions = tf.range(start * batch, (start + steps) * batch, dtype=tf.int64)
    options = dict(batch_size=batch, seed=seed, span=steps * batch)
    indexes, seeds = source.training_order(positions, **options)
    return np.concatenate([indexes[:, tf.newaxis], seeds], axis=1)


def random_lengths(count):
    """Lengths and a source of these, in four buckets."""
    lengths = np.random.default_rng(count).integers(0, 20, count)
    return lengths, numbered(lengths, [3, 10, 15, 20])


@pytest.mark.parametrize(("count", "batch"), [(40, 5), (23, 23)])
def test_every_example_occurs_once_per_epoch(count, batch):
    lengths, source = random_lengths(count)
    batches = read_batches(source, batch, 3 * count // batch)
    epochs = np.reshape(np.concatenate([b["id"] for b in batches]), [3, count])
    assert (np.sort(epochs, axis=1) == np.arange(count)).all()
    for b in batches:
        padded = b["x"].numpy()
        assert padded.shape[1] in (3, 10, 15, 20)
        for row, i in zip(padded, b["id"].numpy(), strict=True):
            assert row.tolist() == [i] * lengths[i] + [0] * (len(row) - lengths[i])


@pytest.mark.parametrize(("count", "batch"), [(23, 22), (19, 6)])
def test_every_example_occurs_equally_often_if_batches_do_not_divide_the_epoch(count, batch):
    _, source = random_lengths(count)
    cycle = np.lcm(count, batch) // batch
    ids = order(source, 0, 2 * cycle, batch)[:, 0] % count
    assert (np.bincount(ids, minlength=count) == 2 * cycle * batch // count).all()
    # As of any other source, the rows of an epoch differ from those of the examples by one batch.
    for epoch in range(1, 2 * cycle * batch // count):
        seen = np.bincount(ids[: -(-epoch * count // batch) * batch], minlength=count)
        assert np.abs(seen - epoch).max() <= 1 and (seen != epoch).sum() <= 2 * batch


def test_groups_are_cut_at_multiples_of_the_batch_and_only_the_rest_moves_up():
    # 11 examples fit into 4 tokens, 5 more into 8, 1 more into 12.
    lengths = [4] * 11 + [8] * 5 + [12]
    source = numbered(lengths, [4, 8, 12])
    groups = source._groups(4)
    assert [(g.bucket, g.first, g.count) for g in groups] == [(0, 0, 8), (1, 8, 4), (2, 12, 5)]
    # The last group has at least one batch, so that its examples are in each epoch.
    groups = numbered([*lengths[:-1], 9], [4, 8, 12])._groups(8)
    assert [(g.bucket, g.count) for g in groups] == [(0, 8), (2, 9)]
    # Boundaries that no sequence needs are not used.
    groups = numbered([1] * 9, [4, 8, 12])._groups(4)
    assert [(g.bucket, g.count) for g in groups] == [(0, 9)]


def test_order_of_the_batches_is_that_of_the_seed_and_differs_between_epochs():
    one, other = (
        (order(in_memory(), 0, 16, 5, seed=seed)[::5, 0] // 40).tolist() for seed in (1, 2)
    )
    assert one != other and one[:8] != one[8:]


@pytest.mark.parametrize(("start", "batch"), [(5, 7), (2**33, 20)])
def test_many_steps_can_be_computed_in_one_call_from_any_step(start, batch):
    steps = [order(in_memory(), start + step, 1, batch) for step in range(12)]
    np.testing.assert_array_equal(order(in_memory(), start, 12, batch), np.concatenate(steps))


@pytest.mark.slow
def test_rows_of_a_step_are_the_same_on_any_replicas_and_after_a_restart():
    token_model.check_order(parsed)


def test_replicas_with_short_rows_have_the_shape_of_the_batch():
    source, layouts = in_memory(), pipeline_layouts(6, 2, 2)
    streams = [kind_of(source).training(x, seed=3, start=0) for x in layouts]
    steps = read_steps(streams, layouts[0], 12)
    shapes = [{e.batch["x"].shape[1] for e in step} for step in steps]
    assert all(len(shape) == 1 for shape in shapes)
    assert len(set.union(*shapes)) == 3


@pytest.mark.slow
def test_loss_is_weighted_by_tokens_the_update_the_same_on_any_replicas_and_traced_once():
    token_model.check_guarantee(in_memory, 5, 2, 6)


def test_rows_of_any_indexes_are_padded_to_the_longest():
    source = numbered([3, 10, 2, 20], [4, 12, 20])
    for index, length in (([0, 2], 4), ([0, 1], 12), ([3], 20), ([4 + 0, 4 + 2], 12)):
        assert source.gather(tf.constant(index, tf.int64))["x"].shape == (len(index), length)


@pytest.mark.parametrize(("batch", "replicas", "pipelines"), [(7, 1, 1), (5, 4, 2)])
def test_evaluation_reads_every_example_once_in_one_shape_per_batch(batch, replicas, pipelines):
    _, source = random_lengths(40)
    layouts = pipeline_layouts(batch, replicas, pipelines)
    steps = kind_of(source).steps(layouts[0])
    read = read_steps([kind_of(source).evaluation(x) for x in layouts], layouts[0], steps)
    ids = [i for step in read for b, mask in map(tuple, step) for i in b["id"][mask == 1].numpy()]
    assert sorted(ids) == list(range(40))
    for step in read:
        assert len({e.batch["x"].shape[1] for e in step}) == 1
    # Short batches are not padded to the longest sequence.
    assert {step[0].batch["x"].shape[1] for step in read} == {3, 10, 15, 20}


def test_features_with_one_value_per_example_are_kept_and_get_no_weights_of_tokens():
    data = {"x": [[1, 2], [3]], "label": [0, 1]}
    batch = ctl.data.bucketed(ctl.data.sequences(data), [3]).gather(tf.constant([0, 1], tf.int64))
    assert "weight" not in batch
    assert batch["label"].numpy().tolist() == [0, 1]
    assert batch["x"].numpy().tolist() == [[1, 2, 0], [3, 0, 0]]
    assert batch["segment_ids"].numpy().tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["positions"].numpy().tolist() == [[0, 1, 0], [0, 0, 0]]


def test_augmentation_has_a_seed_per_epoch_and_example():
    data = ctl.data.augmented(in_memory(), lambda e, seed: {**e, "seed": seed})
    seeds = read_rows(data, "seed", 5, 16)
    assert len(np.unique(seeds, axis=0)) == 80
    assert len(np.unique(seeds[:, 1])) == 40


def test_loop_compiled_for_one_shape_rejects_buckets():
    with pytest.raises(ctl.UsageError, match=r"requires batches of one shape.*ctl\.data\.packed"):
        token_model.make_trainer(in_memory, 5, 1, xla="loop")


def rejected(boundaries):
    return lambda: ctl.data.bucketed(ctl.data.sequences({"x": [[1], [1, 2]]}), boundaries)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((rejected(b), "requires increasing positive") for b in ([], 4, [8, 4], [0, 4], [1.5])),
        (rejected([1]), "1 of 2 sequences are longer than the last boundary, 1: add 2"),
        (lambda: in_memory()._groups(41), "has 40 examples, but the global batch size is 41"),
    ],
)
def test_wrong_use_is_rejected_in_one_line(make, message):
    assert message in one_line(make)
