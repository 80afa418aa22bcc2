"""ctl.data.mixture: several sources in fixed proportions."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import mixing
from ctl.data.elements import source_spec
from ctl.data.kinds import kind_of
from ctl.loop.loop_numbers import measure_loop
from ctl.loop.timing import Throughput
from tests.data import token_model
from tests.data.reading import one_line, read_all, read_rows
from tests.support import reference_model


def numbers(first, count):
    return ctl.data.arrays({"id": np.arange(first, first + count)})


class Parsed(ctl.data.RowSource):
    """Numbers from `first` on, parsed one by one."""

    def __init__(self, first, count):
        self._first, self._count = first, count

    def __len__(self):
        return self._count

    def read(self, indexes):
        return indexes + self._first

    def parse(self, row):
        return {"id": row}


def two_sources():
    return ctl.data.mixture({"a": (numbers(0, 7), 0.7), "b": (Parsed(100, 3), 0.3)})


@functools.cache
def stream():
    """The first 13,000 ids of two_sources(), three periods."""
    return read_rows(two_sources(), "id", 1000, 13)


class InOrder(ctl.data.Arrays):
    """Examples that are not shuffled."""

    def order(self, positions, *, seed, span):
        return positions % len(self)


@pytest.mark.parametrize(("weights", "period"), [([0.7, 0.3], 10), ([4, 2.0, 1, 1], 8)])
def test_proportions_are_exact_in_every_period(weights, period):
    sources = {f"s{i}": (numbers(100 * i, 5 + i), w) for i, w in enumerate(weights)}
    source = ctl.data.mixture(sources)
    rows = np.array(source._rows)
    assert rows.sum() % period == 0
    np.testing.assert_allclose(rows / rows.sum(), np.array(weights) / sum(weights), atol=1e-15)
    positions = tf.range(3 * rows.sum(), dtype=tf.int64)
    indexes, _ = source.training_order(positions, batch_size=1, seed=3, span=len(positions))
    origin = source.gather(indexes)["id"].numpy() // 100
    for first in (0, 17, rows.sum() + 1):
        counts = np.bincount(origin[first : first + rows.sum()])
        assert counts.tolist() == rows.tolist()


def test_proportions_without_a_common_denominator_are_rounded():
    rows = mixing._rows_per_period({"a": np.pi, "b": np.e, "c": 1e-3})
    assert sum(rows) == 2**16
    shares = np.array([np.pi, np.e, 1e-3]) / (np.pi + np.e + 1e-3)
    assert np.abs(np.array(rows) / 2**16 - shares).max() < 1 / 2**16


def test_short_parts_of_the_stream_are_close_to_the_proportions():
    origin = stream() // 100
    counts = np.cumsum(origin == 0)
    # Where the next row of a source lies in its part is random, so it is off by less than one row
    # for each of the two ends.
    difference = counts - 0.7 * np.arange(1, len(counts) + 1)
    assert 0.5 < np.abs(difference).max() < 2
    # The order has no short period.
    assert all((origin[p:] != origin[:-p]).mean() > 0.2 for p in range(1, 100))


def test_source_is_read_without_replacement_in_each_of_its_epochs():
    ids = stream()
    for first, count in ((0, 7), (100, 3)):
        own = ids[(ids >= first) & (ids < first + count)]
        epochs = own[: len(own) // count * count].reshape(-1, count)
        assert (np.sort(epochs, axis=1) == np.arange(first, first + count)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 3


def test_sources_of_one_length_have_their_own_orders():
    own = InOrder({"id": np.arange(200, 250)})
    sources = {"a": (numbers(0, 50), 1), "b": (numbers(100, 50), 1), "own": (own, 1)}
    ids = read_rows(ctl.data.mixture(sources), "id", 10, 15)
    assert (ids[ids < 100].tolist()) != (ids[ids // 100 == 1] - 100).tolist()
    assert ids[ids >= 200].tolist() == [*range(200, 250)]


def test_rows_of_a_step_are_the_same_on_any_replicas_and_after_a_restart():
    token_model.check_order(two_sources, name="id")


def test_every_step_is_computed_from_its_number():
    positions = tf.range(2**40, 2**40 + 18, dtype=tf.int64)
    rows = two_sources().training_order(positions, batch_size=6, seed=3, span=18)
    last = two_sources().training_order(positions[-6:], batch_size=6, seed=3, span=6)
    for whole, part in zip(rows, last, strict=True):
        np.testing.assert_array_equal(whole[-6:], part)


def test_examples_and_epochs_of_each_source_are_counted():
    source = two_sources()
    for positions in (0, 1, 999, 4096 * 3 + 17):
        origin = stream()[:positions] // 100
        a, b = (origin == 0).sum(), (origin == 1).sum()
        assert source.count_examples(positions, seed=3) == {
            "a": {"examples": a, "epochs": a / 7},
            "b": {"examples": b, "epochs": b / 3},
        }


def test_counts_are_in_the_metrics_of_a_loop():
    sizes, weights = {"a": 9, "b": 4}, {"a": 3, "b": 1}
    sources = {n: (ctl.data.arrays(reference_model.examples(sizes[n])), weights[n]) for n in sizes}
    body = {"data_factory": staticmethod(lambda split: ctl.data.mixture(sources))}
    cls = type("Mixed", (reference_model.ReferenceTrainer,), body)
    trainer = reference_model.make_trainer(ctl.testing.make_strategy(1), 8, cls=cls)
    trainer.global_step.assign(5)
    logged = measure_loop(trainer, Throughput(batch=8))
    assert logged["examples/a"] + logged["examples/b"] == 40
    assert logged["examples/a"] == pytest.approx(30, abs=2)
    for name, size in sizes.items():
        assert logged[f"epochs/{name}"] == logged[f"examples/{name}"] / size


def test_augmentation_has_a_seed_per_epoch_of_the_source_and_example():
    data = ctl.data.augmented(two_sources(), lambda e, seed: {**e, "seed": seed})
    assert len(np.unique(read_rows(data, "seed", 10, 30), axis=0)) == 300


def test_packed_sources_are_mixed():
    sources = {
        name: (ctl.data.packed(ctl.data.sequences(token_model.documents(9, seed=seed)), 16), 1)
        for name, seed in (("a", 0), ("b", 1))
    }
    source = ctl.data.mixture(sources)
    parts = [read_all(s)["x"] for s, _ in sources.values()]
    np.testing.assert_array_equal(read_all(source)["x"], np.concatenate(parts))
    assert source_spec(source)["x"].shape[1] == 16


def test_rows_of_any_shape_are_parsed_one_by_one_by_the_function_of_their_source():
    class Sized(Parsed):
        def parse(self, row):
            return {"image": tf.fill([row + 1, 1], row)}

    class Transposed(Parsed):
        def parse(self, row):
            return {"image": tf.transpose(tf.fill([1, row + 1], -row))}

    mixed = ctl.data.mixture({"a": (Sized(0, 7), 0.7), "b": (Transposed(100, 3), 0.3)})
    assert isinstance(mixed, ctl.data.RowSource)
    data = ctl.data.augmented(mixed, lambda e, seed: {"id": e["image"][-1, 0]})
    assert kind_of(data).spec()
    expected = stream()[:70]
    ids = read_rows(data, "id", 10, 7)
    assert ids.tolist() == np.where(expected < 100, expected, -expected).tolist()


def mix(**sources):
    return lambda: ctl.data.mixture(sources)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mix(), "a dict of at least one source"),
        (lambda: ctl.data.mixture([(numbers(0, 1), 1)]), "a dict of at least one source"),
        (mix(a=numbers(0, 1)), "requires (source, weight)"),
        (mix(a=(tf.data.Dataset.range(3), 1)), "requires (source, weight)"),
        *(
            (mix(a=(numbers(0, 1), w)), f"weight {w!r} for 'a', but requires a positive number")
            for w in (0, float("nan"), float("inf"), "1", True)
        ),
        (mix(a=(numbers(0, 1), 1), b=(numbers(0, 1), 1e-9)), "at least 1 / 65,536"),
        (mix(a=(InOrder({"id": [1]}), 1), b=(Parsed(0, 0), 1)), "The source 'b' of ctl.data.mix"),
        (mix(a=(numbers(0, 1), 1), b=(InOrder({"id": [0.5]}), 1)), "'b' has id float32 (), and"),
        (mix(a=(two_sources(), 1)), "pass all sources to one mixture"),
        (mix(a=(ctl.data.sequences({"x": [[1], [1, 2]]}), 1)), "return ctl.data.packed"),
    ],
)
def test_wrong_mixture_is_rejected_in_one_line(make, message):
    assert message in one_line(make)
