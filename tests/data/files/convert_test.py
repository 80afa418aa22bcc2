"""Converting record files, and ArrayRecord files as sources (the extra `arrayrecord`)."""

import os
import sys

import pytest
import tensorflow as tf

import ctl
from ctl import main
from ctl.data.files import convert, record_reader
from tests.data.reading import one_line, read_all, read_epoch
from tests.data.record_files import FEATURES, flip_bit, write


def run(*arguments):
    return main.run(["ctl", "convert", *map(str, arguments)])


def ids(pattern):
    return read_all(ctl.data.records(pattern, FEATURES))["id"].numpy().tolist()


@pytest.mark.parametrize(
    ("name", "compression"), [("a.gz", "GZIP"), ("a", "GZIP"), ("a.zlib", "ZLIB"), ("a", "")]
)
def test_compressed_files_become_readable_in_random_order(tmp_path, capsys, name, compression):
    write(tmp_path / name, range(9), tf.io.TFRecordOptions(compression))
    assert run(tmp_path / "a*", f"--output={tmp_path}/plain") == 0
    assert os.listdir(tmp_path / "plain") == ["a.tfrecord"]
    assert ids(f"{tmp_path}/plain/*") == list(range(9))
    assert capsys.readouterr().out == f"1 of 1: {tmp_path}/plain/a.tfrecord, 9 records\n"


def test_array_record_files_and_back(tmp_path, package):
    paths = [write(tmp_path / f"a-{i}.tfrecord", range(5 * i, 5 * i + 5)) for i in range(2)]
    assert run(*paths, "--format=array_record", f"--output={tmp_path}/arrays") == 0
    assert ids(f"{tmp_path}/arrays/*.array_record") == list(range(10))
    assert run(f"{tmp_path}/arrays/*", f"--output={tmp_path}/back") == 0
    for i, path in enumerate(paths):
        with open(path, "rb") as file:
            assert file.read() == (tmp_path / "back" / f"a-{i}.tfrecord").read_bytes()


def test_damaged_file_is_one_line_and_leaves_nothing(tmp_path):
    path = write(tmp_path / "a", range(9))
    with open(path, "ab") as file:  # breaks off in the head of a record
        file.write(bytes(5))
    for line in ("9 records (the last 5 bytes are not a record)", "8 records (corrupted record at"):
        message = one_line(convert.convert, path, str(tmp_path / "plain"))
        assert f"{path} is damaged after {line}" in message
        assert os.listdir(tmp_path / "plain") == []
        flip_bit(path, -15)


def test_length_of_a_record_is_not_taken_for_gzip(tmp_path):
    records = [bytes(0x8B1F), b"1"]  # the length begins with the first bytes of a gzip file
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        for record in records:
            writer.write(record)
    path, count = convert.convert(str(tmp_path / "a"), str(tmp_path / "plain"))
    assert count == 2
    for file in (str(tmp_path / "a"), path):
        source = ctl.data.records(file, lambda record: {"x": record})
        assert read_all(source)["x"].numpy().tolist() == records


def test_missing_files_and_the_same_folder_are_rejected(tmp_path, capsys):
    assert run(tmp_path / "nothing*", f"--output={tmp_path}") == 2
    assert "ctl convert finds no file that matches" in capsys.readouterr().err
    path = write(tmp_path / "a.tfrecord", range(2))
    assert run(path) == 2
    assert "ctl convert: the following arguments are required: --output" in capsys.readouterr().err
    assert run(path, f"--output={tmp_path}") == 2
    assert "would be replaced" in capsys.readouterr().err
    assert ids(path) == [0, 1]


# ArrayRecord files.


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


def test_records_have_the_order_of_the_same_records_in_tfrecord_files(pattern, tmp_path):
    source = ctl.data.records(pattern, FEATURES)
    same = ctl.data.records([str(tmp_path / "0"), str(tmp_path / "1")], FEATURES)
    assert len(source) == 20
    assert sorted(read_epoch(source)) == list(range(20))
    assert read_epoch(source) == read_epoch(same)
    indexes = tf.constant([19, 3, 10, 9, 3], tf.int64)
    assert source.gather(indexes)["id"].numpy().tolist() == [19, 3, 10, 9, 3]


@pytest.mark.parametrize("offset", [70, 200])
def test_damaged_file_is_one_line(pattern, offset):
    path = tf.io.gfile.glob(pattern)[0]
    flip_bit(path, offset)
    assert f"{path} is damaged" in one_line(lambda: read_epoch(ctl.data.records(pattern, FEATURES)))


def test_what_array_record_does_not_support_is_rejected(pattern, tmp_path):
    message = one_line(ctl.data.records, pattern, FEATURES, skip_damaged=True)
    assert "requires TFRecord files" in message
    gather = ctl.data.records(pattern, FEATURES).without_python().gather
    assert "does not run on a remote host" in one_line(gather, tf.constant([0], tf.int64))
    remote = ["gs://bucket/a.array_record"]
    message = one_line(record_reader.ArrayRecordReader, remote, skip_damaged=False)
    assert "only local ones can be read" in message
    path = write(tmp_path / "a.array_record", range(3))
    assert f"{path} is damaged" in one_line(ctl.data.records, path, FEATURES)


def test_missing_package_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.array_record", range(3))
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    assert "pip install array-record" in one_line(ctl.data.records, path, FEATURES)


def test_format_is_known_by_the_name_of_the_file():
    assert record_reader.is_array_record("a.array_record-00001-of-00002")
    assert record_reader.is_array_record("a.arrayrecord")
    assert not record_reader.is_array_record("array_record/a.tfrecord")
