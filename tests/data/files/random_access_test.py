"""A dataset of another library with random access has ctl's order and resumes at any step."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing


class Pairs:
    """A map-style dataset."""

    def __init__(self, count=10):
        self.count, self.calls = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": np.full([2], index, np.float32), "label": index, "name": f"é{index}"}


class Batched(Pairs):
    """Reads a batch in one call, as the datasets of Hugging Face and TFDS."""

    def __getitems__(self, indexes):
        self.calls += 1
        return [self[index] for index in indexes]


def batches(source, replicas):
    strategy = testing.make_strategy(replicas)
    for batch, _ in itertools.islice(ctl.data.distribute(source, 4, strategy), 7):
        local = strategy.experimental_local_results
        yield {k: np.concatenate(local(v)).tolist() for k, v in batch.items()}


@pytest.mark.parametrize("cls", [Pairs, Batched])
def test_batches_are_those_of_arrays_on_any_replicas(cls):
    arrays = ctl.data.generator(lambda: (Pairs()[i] for i in range(10)))
    dataset = cls()
    read = [*batches(ctl.data.random_access(dataset), 2)]
    assert read == [*batches(arrays, 1)]
    assert read[0]["name"] == [f"é{i}".encode() for i in read[0]["label"]]
    assert cls is Pairs or dataset.calls


def test_parse_makes_the_example():
    source = ctl.data.random_access(Pairs(), lambda e: {"y": e["x"][:1] + 1})
    assert source.gather(tf.constant([3, 1], tf.int64))["y"].numpy().tolist() == [[4], [2]]


@pytest.mark.parametrize(
    ("dataset", "parse", "message"),
    [
        (iter([]), None, r"has no len\(\) and \[index\]"),
        ({"train": Pairs(), "test": Pairs()}, None, r"of 'train', 'test': choose one, such as"),
        (Pairs(0), None, "without examples"),
        (Pairs(), lambda e: (e["x"], 1), "requires dicts: pass parse"),
        (Pairs(), lambda e: {"x": {"a": 1}}, "feature 'x', a dict, which is no array"),
    ],
)
def test_mistakes_are_one_line(dataset, parse, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.data.random_access(dataset, parse)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ([0.0], [0.0, 1.0], r"of shape \[2\], but the first one \[1\]"),
        (0, 0.5, "of type float64, but the first one int64"),
        (0.0, None, "of type object, but the first one float64"),
        ("a", 5, "of type int64, but the first one string"),
    ],
)
def test_examples_of_another_shape_or_type_are_named(first, other, message):
    source = ctl.data.random_access(Pairs(), lambda e: {"x": other if e["label"] == 6 else first})
    with pytest.raises(ctl.UsageError, match=f"^Example 6 has 'x' {message}"):
        next(iter(ctl.data.distribute(source, 10)))


def test_strings_keep_zero_bytes():
    rows = [b"a\0", b"bcd", b"\0\0"]
    source = ctl.data.random_access([{"x": row, "pair": [row, b"\0"]} for row in rows])
    batch = source.gather(tf.constant([2, 0, 1], tf.int64))
    assert batch["x"].numpy().tolist() == [rows[2], rows[0], rows[1]]
    assert batch["pair"].numpy().tolist() == [[rows[i], b"\0"] for i in (2, 0, 1)]


class OneReader:
    """Reads a file at its own position, as most map-style datasets of files do."""

    def __init__(self):
        self.place = 0

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.place = index
        time.sleep(1e-4)  # another thread may run
        return {"x": self.place, "index": index}


def test_dataset_is_read_by_one_thread_at_a_time():
    data = ctl.data.distribute(ctl.data.random_access(OneReader()), 8)
    for batch, _ in itertools.islice(data, 50):
        assert batch["x"].numpy().tolist() == batch["index"].numpy().tolist()
