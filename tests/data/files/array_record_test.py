"""ArrayRecord files as sources. The package array-record is an extra, `arrayrecord`."""

import builtins

import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, convert
from ctl.data.data_errors import report_data_errors
from ctl.data.files import record_reader
from ctl.data.layout import Layout
from tests.data.record_files import FEATURES, flip_bit, write

requires_package = pytest.mark.usefixtures("package")


@pytest.fixture
def package():
    return pytest.importorskip("array_record")


@pytest.fixture
def pattern(tmp_path, package):
    """Two files of ten examples."""
    for file in range(2):
        path = write(tmp_path / f"{file}", range(10 * file, 10 * file + 10))
        convert.convert(path, str(tmp_path), output_format="array_record")
    return str(tmp_path / "*.array_record")


def epoch(source):
    stream = batching.training_batches(source, Layout(4, 1), seed=0, start=0).take(len(source) // 4)
    with report_data_errors("training", dict):
        return [i for e in stream for i in e.batch["id"].numpy().tolist()]


def test_records_have_the_order_of_the_same_records_in_tfrecord_files(pattern, tmp_path):
    source = ctl.data.records(pattern, FEATURES)
    same = ctl.data.records([str(tmp_path / "0"), str(tmp_path / "1")], FEATURES)
    assert len(source) == 20
    assert sorted(epoch(source)) == list(range(20))
    assert epoch(source) == epoch(same)
    indexes = tf.constant([19, 3, 10, 9, 3], tf.int64)
    assert source.gather(indexes)["id"].numpy().tolist() == [19, 3, 10, 9, 3]


@pytest.mark.parametrize("offset", [70, 200])
def test_damaged_file_is_one_line(pattern, offset):
    path = tf.io.gfile.glob(pattern)[0]
    flip_bit(path, offset)
    with pytest.raises(ctl.UsageError, match=f"{path} is damaged") as error:
        epoch(ctl.data.records(pattern, FEATURES))
    assert "\n" not in str(error.value)


@requires_package
def test_file_of_another_format_is_one_line(tmp_path):
    write(tmp_path / "a.array_record", range(3))
    with pytest.raises(ctl.UsageError, match="is damaged") as error:
        ctl.data.records(str(tmp_path / "a.array_record"), FEATURES)
    assert "\n" not in str(error.value)


def test_what_array_record_does_not_support_is_rejected(pattern):
    with pytest.raises(ctl.UsageError, match="requires TFRecord files"):
        ctl.data.records(pattern, FEATURES, skip_damaged=True)
    with pytest.raises(ctl.UsageError, match="does not run on a remote host"):
        ctl.data.records(pattern, FEATURES).without_python().gather(tf.constant([0], tf.int64))
    with pytest.raises(ctl.UsageError, match="only local ones can be read"):
        record_reader.ArrayRecordReader(["gs://bucket/a.array_record"], skip_damaged=False)


def test_missing_package_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.array_record", range(3))
    original = builtins.__import__

    def without_package(name, *arguments):
        if name.startswith("array_record"):
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_package)
    with pytest.raises(ctl.UsageError, match="pip install array-record"):
        ctl.data.records(str(tmp_path / "a.array_record"), FEATURES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.array_record", True), ("a.array_record-00001-of-00002", True), ("a.arrayrecord", True),
     ("a.tfrecord", False), ("array_record/a.tfrecord", False)],
)  # fmt: skip
def test_format_is_known_by_the_name_of_the_file(name, expected):
    assert record_reader.is_array_record(name) == expected
