"""Examples in memory: arrays, data frames, structured arrays and generators."""

import numpy as np
import pandas
import pytest
import tensorflow as tf

import ctl
from tests.data.reading import lists, one_line


def test_arrays_gives_the_rows_of_every_array_in_their_types():
    x = np.arange(12).reshape(6, 2).astype(np.float16)
    source = ctl.data.arrays({"x": x, "label": list("abcdef")})
    batch = source.gather(tf.constant([4, 0, 4], tf.int64))
    assert len(source) == 6
    assert batch["x"].dtype == tf.float16
    assert batch["x"].numpy().tolist() == [[8, 9], [0, 1], [8, 9]]
    assert batch["label"].numpy().tolist() == [b"e", b"a", b"e"]


def test_arrays_are_copied_and_outlive_the_tf_function_that_creates_them():
    array, sources = np.arange(3), []

    @tf.function
    def build():
        sources.append(ctl.data.arrays({"x": array}))
        return tf.constant(0)

    build()
    array[:] = -1
    assert lists(sources[0]) == {"x": [0, 1, 2]}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "at least one array"),
        (np.zeros(3), "requires a dict"),
        ({"x": [1, 2], "label": {"b": [1]}}, "have {'x': 2, 'label/b': 1} examples, but each must"),
        ({"x": np.zeros([0, 3])}, "{'x': 0} examples"),
        ({"x": 3.0}, "single value for 'x'"),
        ({"x": [[1], [2, 3]]}, "'x', a list"),
        ({"x": {1}}, "'x', a set"),
    ],
)
def test_unsupported_features_are_rejected_in_one_line(features, message):
    assert message in one_line(ctl.data.arrays, features)


def test_several_targets_are_a_dict():
    expected = {"x": [5, 6], "label": {"a": [1, 2], "b": [[3, 4], [5, 6]]}}
    rows = [(5, {"a": 1, "b": [3, 4]}), (6, {"a": 2, "b": [5, 6]})]
    sources = [ctl.data.arrays(expected), ctl.data.generator(lambda: iter(rows))]
    sources.append(ctl.data.mixture({"one": (sources[0], 1.0)}))
    for source in sources:
        batch = source.gather(tf.range(2, dtype=tf.int64))
        assert tf.nest.map_structure(lambda value: value.numpy().tolist(), batch) == expected


def test_fields_of_a_structured_array_are_features():
    fields = [("x", "f4", [2]), ("name", "S1")]
    rows = np.array([([0.5, 1.5], b"a"), ([2.5, 3.5], b"b")], fields)
    expected = {"x": [[0.5, 1.5], [2.5, 3.5]], "name": [b"a", b"b"]}
    assert lists(ctl.data.arrays(rows)) == expected


def test_columns_of_a_data_frame_are_features():
    columns = {"x": [0.5, 1.5], "label": [3, 4], "name": ["a", "bb"], "pair": [[1, 2], [3, 4]]}
    frame = pandas.DataFrame(columns)
    assert lists(ctl.data.arrays(frame)) == {**columns, "name": [b"a", b"bb"]}
    shuffled = frame.iloc[[1, 0]]  # the rows count, not the index
    assert lists(ctl.data.arrays(shuffled))["label"] == [4, 3]


@pytest.mark.parametrize("values", [["a", None], [[1], [2, 3]], np.array(["2026-01-01"], "M8[s]")])
def test_columns_that_are_no_numbers_or_strings_are_rejected(values):
    error = one_line(ctl.data.arrays, pandas.DataFrame({"odd": pandas.Series(values)}))
    kind = "times" if isinstance(values, np.ndarray) else "values of the types"
    assert f"The column 'odd' has {kind}" in error
    twice = pandas.DataFrame([[1, 2]], columns=["x", "x"])
    assert "The data frame has several columns 'x'" in one_line(ctl.data.arrays, twice)


@pytest.mark.parametrize("make", [lambda x, i: {"x": x, "label": i}, lambda x, i: (x, i)])
def test_generator_is_read_once_and_may_reuse_an_array(make):
    calls, x = [], np.zeros(2)

    def examples():
        calls.append(1)
        for i in range(3):
            x[:] = i
            yield make(x, i)

    expected = {"x": [[0, 0], [1, 1], [2, 2]], "label": [0, 1, 2]}
    assert lists(ctl.data.generator(examples)) == expected
    assert len(calls) == 1


def test_strings_of_a_generator_keep_zero_bytes():
    rows = [b"a\0", b"bcd"]
    for examples in ([{"x": row, "label": 1} for row in rows], [(row, 1) for row in rows]):
        assert lists(ctl.data.generator(lambda examples=examples: examples))["x"] == rows


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "has no examples"),
        ([3], "Example 1 of the generator is an int"),
        ([([[1], [1, 2]], 0)], "Example 1 of the generator has a value that is no array"),
        ([{"x": 1}, {"y": 1}], "Example 2 of the generator has the features ['y']"),
        ([{"x": [1]}] * 2 + [{"x": [1, 2]}], "Example 3 of the generator has 'x' of shape (2,)"),
        ([{"x": 1}, {"x": 1.5}], "Example 2 of the generator has 'x' of shape () and dtype float"),
    ],
)
def test_wrong_examples_of_a_generator_are_named(examples, message):
    assert message in one_line(ctl.data.generator, lambda: iter(examples))
    assert "requires a function" in one_line(ctl.data.generator, iter(examples))


def test_column_called_weight_in_memory_must_be_named():
    frame = pandas.DataFrame({"weight": [1.0, 2.0], "label": [3, 4]})
    for table in (frame, frame.to_records(index=False)):
        assert "if it is a feature, rename it" in one_line(ctl.data.arrays, table)
    assert lists(ctl.data.arrays(dict(frame))) == {"weight": [1, 2], "label": [3, 4]}
    renamed = frame.rename(columns={"weight": "kilograms"})
    assert set(lists(ctl.data.arrays(renamed))) == {"kilograms", "label"}
