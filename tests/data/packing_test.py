"""ctl.data.packed: sequences in rows of one length."""

import itertools
import os
import pathlib

import numpy as np
import pytest

import ctl
from ctl.data import packing
from ctl.data.elements import source_spec
from tests.data import token_model
from tests.data.reading import lists, one_line, read_all, read_batches

LENGTH = 16


def rows_of(lengths, **arguments):
    """The pieces of each row as (sequence, start, size)."""
    result = packing.pack(np.array(lengths), **arguments)
    pieces = list(zip(result.examples, result.starts, result.sizes, strict=True))
    return [pieces[a:b] for a, b in itertools.pairwise(result.row_splits)]


def first_fit(lengths, length):
    """First-fit in the order of decreasing length, as it is defined."""
    rows = []
    for size in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + size <= length), None)
        if row is None:
            rows.append(row := [])
        row.append(size)
    return rows


def test_packing_is_that_of_the_definition():
    lengths = np.random.default_rng(0).integers(1, 51, 300).tolist()
    rows = rows_of(lengths, length=50, window=300, seed=0)
    expected = first_fit([n for n in lengths if n < 50], 50)
    sizes = [sorted((int(size) for *_, size in row), reverse=True) for row in rows]
    assert sizes == [[50]] * lengths.count(50) + expected


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_each_token_is_in_one_row(window):
    lengths = np.random.default_rng(1).integers(0, 70, 500)
    rows = rows_of(lengths, length=20, window=window, seed=3)
    tokens = [(e, s + i) for row in rows for e, s, size in row for i in range(size)]
    assert sorted(tokens) == [(e, i) for e, n in enumerate(lengths) for i in range(n)]
    assert max(sum(size for *_, size in row) for row in rows) <= 20


def test_windows_are_determined_by_the_seed_alone(monkeypatch):
    lengths = np.random.default_rng(1).integers(1, 20, 500)
    rows = {seed: rows_of(lengths, length=20, window=50, seed=seed) for seed in (1, 2)}
    assert rows[1] != rows[2]
    monkeypatch.setattr(packing, "_WINDOWS_PER_CALL", 2)
    assert rows_of(lengths, length=20, window=50, seed=1) == rows[1]


def test_every_byte_of_a_text_occurs_once_per_epoch_with_little_padding():
    paths = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:40]
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    # The number of a byte in the corpus identifies it.
    ends = np.cumsum([len(text) for text in texts])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    corpus = ctl.data.sequences({"byte": texts, "number": numbers})
    source = ctl.data.packed(corpus, 256, split_long=True)
    assert source.padding < 0.02
    batches = read_batches(source, 64, -(-len(source) // 64))
    rows = {n: np.concatenate([b[n] for b in batches])[: len(source)] for n in batches[0]}
    is_token = rows["weight"] > 0
    seen = rows["number"][is_token]
    assert np.array_equal(np.sort(seen), np.arange(ends[-1]))
    assert np.array_equal(rows["byte"][is_token], np.concatenate(texts)[seen])
    assert 1 - is_token.mean() == pytest.approx(source.padding)


def test_row_has_its_sequences_in_segments_with_positions():
    x = [[1, 2, 3], [], [4, 5], [6, 7, 8, 9, 10, 11, 12]]
    source = ctl.data.packed(ctl.data.sequences({"x": x}), 6, split_long=True, seed=1)
    batch = lists(source)
    assert batch["x"] == [[6, 7, 8, 9, 10, 11], [4, 5, 1, 2, 3, 12]]
    assert batch["segment_ids"] == [[1] * 6, [1, 1, 2, 2, 2, 3]]
    assert batch["positions"] == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]]
    assert batch["weight"] == [[1] * 6, [1] * 6]
    # Padding is at the end, and has no segment.
    source = ctl.data.packed(ctl.data.sequences({"x": [[1, 2]]}), 5)
    batch = lists(source)
    assert (batch["x"], batch["segment_ids"]) == ([[1, 2, 0, 0, 0]], [[1, 1, 0, 0, 0]])
    assert (batch["weight"], source.padding) == ([[1, 1, 0, 0, 0]], pytest.approx(3 / 5))


def test_weights_of_the_source_become_those_of_its_tokens():
    x = [[1, 2, 3], [4]]
    for weight in ([0.5, 2.0], [[0.5, 0.5, 0.5], [2.0]]):
        batch = read_all(ctl.data.packed(ctl.data.sequences({"x": x, "weight": weight}), 5))
        weights = dict(zip(batch["x"].numpy()[0].tolist(), batch["weight"].numpy()[0], strict=True))
        assert weights == {1: 0.5, 2: 0.5, 3: 0.5, 4: 2.0, 0: 0.0}


@pytest.mark.slow
def test_rows_are_the_same_from_memory_and_from_parsed_examples(tmp_path):
    data = token_model.documents(9)
    expected = read_all(ctl.data.packed(ctl.data.sequences(data), LENGTH))
    for _ in range(2):  # the second one reads the lengths from the file
        path = str(tmp_path / "a/lengths.npy")
        source = ctl.data.packed(token_model.Documents(9), LENGTH, lengths=path)
        batch = read_all(source)
        assert batch.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)
            assert batch[name].shape[1:] == source_spec(source)[name].shape[1:]


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        (dict(x=[[1], [1, 2]]), dict(length=0), "length=0, but requires an integer of at"),
        (dict(x=[[1], [1, 2]]), dict(length=4.0), "length=4.0"),
        (dict(x=[[1], [1, 2]]), dict(window=0), "window=0"),
        (dict(x=[[1], [1, 2]]), dict(seed=-1), "seed=-1"),
        (dict(x=[[1, 2, 3], [1]]), {}, "1 of 2 sequences have more than length=2 tokens, at mo"),
        (dict(x=[[], []]), {}, "All sequences are empty"),
        (dict(x=[[1], [2]], label=[0, 1]), {}, "feature 'label' with one value per example"),
    ],
)
def test_wrong_use_is_rejected_in_one_line(features, options, message):
    source = ctl.data.sequences(features)
    assert message in one_line(ctl.data.packed, source, **{"length": 2, **options})
