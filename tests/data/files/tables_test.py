"""Examples in memory: arrays, data frames, structured arrays, generators, CSV, Parquet and text."""

import sys

import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import tensorflow as tf

import ctl
from ctl.hardware import host
from tests.data.reading import one_line, read_all


def lists(source):
    return {name: value.numpy().tolist() for name, value in read_all(source).items()}


def test_arrays_gives_the_rows_of_every_array():
    source = ctl.data.arrays({"x": np.arange(12.0).reshape(6, 2), "label": list("abcdef")})
    batch = source.gather(tf.constant([4, 0, 4], tf.int64))
    assert len(source) == 6
    assert batch["x"].numpy().tolist() == [[8, 9], [0, 1], [8, 9]]
    assert batch["label"].numpy().tolist() == [b"e", b"a", b"e"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float16, np.float64, bool])
def test_arrays_keeps_types(dtype):
    source = ctl.data.arrays({"x": np.ones([2, 3], dtype)})
    assert source.gather(tf.constant([1], tf.int64))["x"].dtype == tf.as_dtype(dtype)


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
        (
            {"x": np.zeros(3), "label": {"a": [1, 2, 3], "b": [1]}},
            "{'x': 3, 'label/a': 3, 'label/b': 1} examples, but each must have the same number",
        ),
        ({"x": np.zeros([0, 3])}, "{'x': 0} examples"),
        ({"x": 3.0}, "single value for 'x'"),
        ({"x": [[1], [2, 3]]}, "'x', a list"),
        ({"x": object()}, "'x', an object"),
    ],
    ids=["no array", "not a dict", "counts", "empty", "scalar", "ragged", "object"],
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
    frame = pandas.DataFrame(
        {"x": [0.5, 1.5], "label": [3, 4], "name": ["a", "bb"], "pair": [[1, 2], [3, 4]]}
    )
    assert lists(ctl.data.arrays(frame)) == {**frame.to_dict("list"), "name": [b"a", b"bb"]}
    shuffled = frame.iloc[[1, 0]]  # the rows count, not the index
    assert lists(ctl.data.arrays(shuffled))["label"] == [4, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], "NoneType, str|float, str"),
        ([[1], [2, 3]], "lists of different lengths"),
        (np.array(["2026-01-01"], "M8[s]"), "times"),
    ],
)
def test_columns_that_are_no_numbers_or_strings_are_rejected(values, message):
    error = one_line(ctl.data.arrays, pandas.DataFrame({"odd": pandas.Series(values)}))
    assert "The column 'odd' has" in error
    assert any(part in error for part in message.split("|"))
    twice = pandas.DataFrame([[1, 2]], columns=["x", "x"])
    assert "The data frame has several columns 'x'" in one_line(ctl.data.arrays, twice)


@pytest.mark.parametrize(
    "example", [lambda i: {"x": [i, i + 1], "label": i}, lambda i: ([i, i + 1], i)]
)
def test_generator_is_read_once(example):
    calls = []

    def examples():
        calls.append(1)
        return (example(i) for i in range(3))

    source = ctl.data.generator(examples)
    assert lists(source) == {"x": [[0, 1], [1, 2], [2, 3]], "label": [0, 1, 2]}
    assert len(calls) == 1


def test_generator_may_reuse_an_array():
    def examples():
        x = np.zeros(2)
        for i in range(3):
            x[:] = i
            yield {"x": x}

    assert lists(ctl.data.generator(examples)) == {"x": [[0, 0], [1, 1], [2, 2]]}


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
        (
            [{"x": 1}, {"x": 1.5}],
            "Example 2 of the generator has 'x' of shape () and dtype float64",
        ),
    ],
)
def test_wrong_examples_of_a_generator_are_named(examples, message):
    assert message in one_line(ctl.data.generator, lambda: iter(examples))
    assert "requires a function" in one_line(ctl.data.generator, iter(examples))


def write_csv(folder):
    (folder / "a.csv").write_text("x,label,name\n0.5,1,one\n1.5,2,two\n")
    (folder / "b.csv").write_text("x,label,name\n2.5,3,three\n")
    return str(folder / "*.csv")


def write_parquet(folder):
    for name, columns in {
        "a": {"x": [0.5, 1.5], "label": [1, 2], "name": ["one", "two"]},
        "b": {"x": [2.5], "label": [3], "name": ["three"]},
    }.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    return str(folder / "*.parquet")


@pytest.mark.parametrize(
    ("read", "write"), [(ctl.data.csv, write_csv), (ctl.data.parquet, write_parquet)]
)
def test_columns_of_files_are_features(tmp_path, read, write):
    pattern = write(tmp_path)
    assert lists(read(pattern)) == {
        "x": [0.5, 1.5, 2.5],
        "label": [1, 2, 3],
        "name": [b"one", b"two", b"three"],
    }
    assert set(lists(read(pattern, columns=["label", "x"]))) == {"label", "x"}
    assert "lable" in one_line(read, pattern, columns=["lable"])


@pytest.mark.parametrize("columns", [None, ["height", "weight"]])
def test_column_called_weight_in_a_file_must_be_named(tmp_path, columns):
    path = tmp_path / "a.csv"
    path.write_text("height,weight,label\n1,2,3\n")
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), tmp_path / "a.parquet")
    for function in (ctl.data.csv, ctl.data.parquet):
        file = str(tmp_path / f"a.{function.__name__}")
        message = one_line(function, file, columns=columns)
        assert 'has a column "weight", which may be a feature or the weight' in message
        assert lists(function(file, columns={"kg": "weight", "x": "height"})) == {
            "kg": [2],
            "x": [1],
        }
        assert lists(function(file, columns={"weight": "weight"})) == {"weight": [2]}
        assert lists(function(file, columns=["height"])) == {"height": [1]}


def test_column_called_weight_in_memory_must_be_named():
    frame = pandas.DataFrame({"weight": [1.0, 2.0], "label": [3, 4]})
    for table in (frame, frame.to_records(index=False)):
        assert "if it is a feature, rename it" in one_line(ctl.data.arrays, table)
    assert lists(ctl.data.arrays(dict(frame))) == {"weight": [1, 2], "label": [3, 4]}
    renamed = frame.rename(columns={"weight": "kilograms"})
    assert set(lists(ctl.data.arrays(renamed))) == {"kilograms", "label"}


def test_lists_in_parquet_are_rows_of_arrays(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]]}), tmp_path / "a.parquet"
    )
    assert lists(ctl.data.parquet(str(tmp_path / "a.parquet"))) == {"x": [[1, 2], [3, 4]]}


def test_parquet_with_more_values_than_memory_is_not_read(tmp_path, monkeypatch):
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"x": [0] * 1000, "y": [[1, 2]] * 1000}), path)
    monkeypatch.setattr(host, "memory_limit", lambda: 20_000)
    assert "a.parquet cannot be read: its 24000 bytes do not fit" in one_line(
        ctl.data.parquet, path
    )
    assert len(ctl.data.parquet(path, columns=["x"])) == 1000
    assert len(ctl.data.parquet(path, columns={"new": "y"})) == 1000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x,y\n1,2\n3\n"}, "a.csv cannot be read"),
        ({"a.csv": "x\n1\n", "b.csv": "y\n1\n"}, "b.csv has the columns ['y']"),
        ({"a.csv": "x,y\n1,2\n,3\n"}, "The column 'x' has 1 empty values"),
        ({"a.csv": "x,y,x\n1,2,3\n"}, "a.csv has several columns 'x'"),
    ],
)
def test_wrong_files_are_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert message in one_line(ctl.data.csv, str(tmp_path / "*.csv"))


@pytest.mark.parametrize("kind", ["csv", "parquet", "text"])
def test_missing_files_are_those_of_the_function_that_reads_them(kind):
    message = one_line(getattr(ctl.data, kind), "none/*")
    assert message == (
        f"ctl.data.{kind} finds no file that matches 'none/*': fix the pattern, or data.dir."
    )
    assert one_line(getattr(ctl.data, kind), []).startswith(
        f"ctl.data.{kind} requires at least one"
    )


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in one_line(ctl.data.csv, "a.csv")


# Text.


def test_lines_are_examples(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\r\nthr\xc3\xa9e")
    (tmp_path / "b.txt").write_bytes(b"four\n")
    lines = read_all(ctl.data.text(str(tmp_path / "*.txt")))["text"].numpy().tolist()
    assert lines == [b"one", b"", b"two", "thrée".encode(), b"four"]


@pytest.mark.parametrize("length", [1, 4, 9])
def test_every_byte_is_in_one_block(tmp_path, length):
    (tmp_path / "a").write_bytes(b"01234")
    (tmp_path / "b").write_bytes(b"56789")
    batch = read_all(ctl.data.text([str(tmp_path / "a"), str(tmp_path / "b")], length=length))
    blocks = 9 // length
    expected = np.frombuffer(b"0123456789", np.uint8)
    assert batch["x"].dtype == tf.int32
    assert batch["x"].shape == (blocks, length)
    np.testing.assert_array_equal(np.ravel(batch["x"]), expected[: blocks * length])
    np.testing.assert_array_equal(np.ravel(batch["label"]), expected[1 : blocks * length + 1])


@pytest.mark.parametrize(
    ("content", "length", "message"),
    [
        (b"", None, "has no lines"),
        (b"0123", 4, "has 4 bytes, but must have at least length + 1 = 5"),
        (b"0123", 0, "requires at least 1 byte"),
        (b"0123", "2", "length='2'"),
    ],
)
def test_wrong_text_is_rejected_in_one_line(tmp_path, content, length, message):
    (tmp_path / "a").write_bytes(content)
    assert message in one_line(ctl.data.text, str(tmp_path / "a"), length=length)
