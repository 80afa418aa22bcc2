"""Tables in memory: data frames, structured arrays, generators, CSV and Parquet."""

import builtins

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import elements


def read_all(source):
    batch = source.gather(tf.range(len(source), dtype=tf.int64))
    return {name: value.numpy().tolist() for name, value in batch.items()}


def message_of(function, *arguments, **keywords):
    with pytest.raises(ctl.UsageError) as error:
        function(*arguments, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_fields_of_a_structured_array_are_features():
    rows = np.array(
        [(1, [0.5, 1.5], b"a"), (2, [2.5, 3.5], b"b")],
        [("label", "i8"), ("x", "f4", [2]), ("name", "S1")],
    )
    assert read_all(ctl.data.arrays(rows)) == {
        "label": [1, 2],
        "x": [[0.5, 1.5], [2.5, 3.5]],
        "name": [b"a", b"b"],
    }


def test_columns_of_a_data_frame_are_features():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"x": [0.5, 1.5], "label": [3, 4], "name": ["a", "bb"], "pair": [[1, 2], [3, 4]]}
    )
    assert read_all(ctl.data.arrays(frame)) == {
        "x": [0.5, 1.5],
        "label": [3, 4],
        "name": [b"a", b"bb"],
        "pair": [[1, 2], [3, 4]],
    }
    shuffled = frame.iloc[[1, 0]]  # the rows count, not the index
    assert read_all(ctl.data.arrays(shuffled))["label"] == [4, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], "NoneType, str|float, str"),
        ([[1], [2, 3]], "lists of different lengths"),
        (np.array(["2026-01-01"], "M8[s]"), "times"),
    ],
)
def test_columns_that_are_no_numbers_or_strings_are_rejected(values, message):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"odd": pandas.Series(values)})
    error = message_of(ctl.data.arrays, frame)
    assert "The column 'odd' has" in error
    assert any(part in error for part in message.split("|"))


@pytest.mark.parametrize(
    "example", [lambda i: {"x": [i, i + 1], "label": i}, lambda i: ([i, i + 1], i)]
)
def test_generator_is_read_once(example):
    calls = []

    def examples():
        calls.append(1)
        return (example(i) for i in range(3))

    source = ctl.data.generator(examples)
    assert read_all(source) == {"x": [[0, 1], [1, 2], [2, 3]], "label": [0, 1, 2]}
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "has no examples"),
        ([3], "Example 1 of the generator is an int"),
        ([{"x": 1}, {"y": 1}], "Example 2 of the generator has the features ['y']"),
        (
            [{"x": [1]}, {"x": [1]}, {"x": [1, 2]}],
            "Example 3 of the generator has 'x' of shape (2,)",
        ),
        (
            [{"x": 1}, {"x": 1.5}],
            "Example 2 of the generator has 'x' of shape () and dtype float64",
        ),
    ],
)
def test_wrong_examples_of_a_generator_are_named(examples, message):
    assert message in message_of(ctl.data.generator, lambda: iter(examples))


def test_generator_requires_a_function():
    assert "requires a function" in message_of(ctl.data.generator, iter([]))


@pytest.mark.parametrize(
    ("data", "function"),
    [
        ({"x": np.zeros(3)}, "ctl.data.arrays(...)"),
        (np.zeros(3), "ctl.data.arrays(...)"),
        (iter([]), "ctl.data.generator(function)"),
    ],
)
def test_common_types_of_data_get_the_name_of_their_source(data, function):
    assert f"such as {function}." in message_of(elements.check_data, data, "train")


def write_csv(folder):
    (folder / "a.csv").write_text("x,label,name\n0.5,1,one\n1.5,2,two\n")
    (folder / "b.csv").write_text("x,label,name\n2.5,3,three\n")
    return str(folder / "*.csv")


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, columns in {
        "a": {"x": [0.5, 1.5], "label": [1, 2], "name": ["one", "two"]},
        "b": {"x": [2.5], "label": [3], "name": ["three"]},
    }.items():
        parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    return str(folder / "*.parquet")


@pytest.mark.parametrize(
    ("read", "write"), [(ctl.data.csv, write_csv), (ctl.data.parquet, write_parquet)]
)
def test_columns_of_files_are_features(tmp_path, read, write):
    pytest.importorskip("pyarrow")
    pattern = write(tmp_path)
    assert read_all(read(pattern)) == {
        "x": [0.5, 1.5, 2.5],
        "label": [1, 2, 3],
        "name": [b"one", b"two", b"three"],
    }
    assert set(read_all(read(pattern, columns=["label", "x"]))) == {"label", "x"}
    assert "lable" in message_of(read, pattern, columns=["lable"])


def test_lists_in_parquet_are_rows_of_arrays(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]]}), tmp_path / "a.parquet")
    assert read_all(ctl.data.parquet(str(tmp_path / "a.parquet"))) == {"x": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x,y\n1,2\n3\n"}, "a.csv cannot be read"),
        ({"a.csv": "x\n1\n", "b.csv": "y\n1\n"}, "b.csv has the columns ['y']"),
        ({"a.csv": "x,y\n1,2\n,3\n"}, "The column 'x' has 1 empty values"),
        ({}, "No record file matches"),
    ],
)
def test_wrong_files_are_named(tmp_path, files, message):
    pytest.importorskip("pyarrow")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert message in message_of(ctl.data.csv, str(tmp_path / "*.csv"))


def test_missing_package_is_named(monkeypatch):
    original = builtins.__import__

    def without_package(name, *arguments):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_package)
    assert "pip install pyarrow" in message_of(ctl.data.csv, "a.csv")
