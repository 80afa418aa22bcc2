"""Examples of CSV, Parquet and text files."""

import sys

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import tensorflow as tf

import ctl
from tests.data.reading import lists, one_line, read_all


def write_csv(folder):
    (folder / "a.csv").write_text("x,label,name\n0.5,1,one\n1.5,2,two\n")
    (folder / "b.csv").write_text("x,label,name\n2.5,3,three\n")
    return str(folder / "*.csv")


def write_parquet(folder):
    write_csv(folder)
    for path in folder.glob("*.csv"):
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), path.with_suffix(".parquet"))
    return str(folder / "*.parquet")


@pytest.mark.parametrize(
    ("read", "write"), [(ctl.data.csv, write_csv), (ctl.data.parquet, write_parquet)]
)
def test_columns_of_files_are_features(tmp_path, read, write):
    pattern = write(tmp_path)
    numbers = {"x": [0.5, 1.5, 2.5], "label": [1, 2, 3]}
    assert lists(read(pattern)) == {**numbers, "name": [b"one", b"two", b"three"]}
    assert lists(read(pattern, columns=["label", "x"])) == numbers
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
        named = function(file, columns={"kg": "weight", "x": "height"})
        assert lists(named) == {"kg": [2], "x": [1]}
        assert lists(function(file, columns={"weight": "weight"})) == {"weight": [2]}
        assert lists(function(file, columns=["height"])) == {"height": [1]}


def test_parquet_with_more_values_than_memory_is_not_read(tmp_path, monkeypatch):
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"x": [0] * 1000, "y": [[1, 2]] * 1000}), path)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (20_000, 20_000))
    message = one_line(ctl.data.parquet, path)
    assert "a.parquet cannot be read: its 24000 bytes do not fit" in message
    assert len(ctl.data.parquet(path, columns=["x"])) == 1000
    assert lists(ctl.data.parquet(path, columns={"new": "y"})) == {"new": [[1, 2]] * 1000}


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
    assert message.startswith(f"ctl.data.{kind} finds no file that matches 'none/*': fix the pat")


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in one_line(ctl.data.csv, "a.csv")


# Text.


def test_lines_are_examples(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\r\nthr\xc3\xa9e")
    (tmp_path / "b.txt").write_bytes(b"four\n")
    lines = read_all(ctl.data.text(str(tmp_path / "*.txt")))["text"].numpy().tolist()
    assert lines == [b"one", b"", b"two", "thrée".encode(), b"four"]


@pytest.mark.parametrize("length", [1, 4])
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
