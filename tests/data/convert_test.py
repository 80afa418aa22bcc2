"""python -m ctl.data.convert: files that can be read in random order."""

import os

import pytest
import tensorflow as tf

import ctl
from ctl.data import convert
from tests.data.record_files import FEATURES, flip_bit, write


def run(*arguments):
    return convert.main(["convert", *map(str, arguments)])


def ids(pattern):
    source = ctl.data.records(pattern, FEATURES)
    return source.gather(tf.range(len(source), dtype=tf.int64))["id"].numpy().tolist()


@pytest.mark.parametrize(
    ("name", "compression"), [("a.gz", "GZIP"), ("a", "GZIP"), ("a.zlib", "ZLIB"), ("a", "")]
)
def test_compressed_files_become_readable_in_random_order(tmp_path, capsys, name, compression):
    write(tmp_path / name, range(9), tf.io.TFRecordOptions(compression))
    assert run(tmp_path / "a*", f"--output={tmp_path}/plain") == 0
    assert os.listdir(tmp_path / "plain") == ["a.tfrecord"]
    assert ids(f"{tmp_path}/plain/*") == list(range(9))
    assert capsys.readouterr().out == f"1 of 1: {tmp_path}/plain/a.tfrecord, 9 records\n"


def test_array_record_files_and_back(tmp_path):
    pytest.importorskip("array_record")
    paths = [write(tmp_path / f"a-{i}.tfrecord", range(5 * i, 5 * i + 5)) for i in range(2)]
    assert run(*paths, "--format=array_record", f"--output={tmp_path}/arrays") == 0
    assert ids(f"{tmp_path}/arrays/*.array_record") == list(range(10))
    assert run(f"{tmp_path}/arrays/*", f"--output={tmp_path}/back") == 0
    for i, path in enumerate(paths):
        with open(path, "rb") as file:
            assert file.read() == (tmp_path / "back" / f"a-{i}.tfrecord").read_bytes()


def test_damaged_file_is_one_line_and_leaves_nothing(tmp_path, capsys):
    path = write(tmp_path / "a", range(9))
    flip_bit(path, -10)
    assert run(path, f"--output={tmp_path}/plain") == 2
    message = capsys.readouterr().err
    assert f"ctl.data.convert: {path} is damaged after 8 records" in message
    assert message.count("\n") == 1
    assert os.listdir(tmp_path / "plain") == []


def test_missing_files_and_the_same_folder_are_rejected(tmp_path, capsys):
    assert run(tmp_path / "nothing*", f"--output={tmp_path}") == 2
    assert "No record file matches" in capsys.readouterr().err
    path = write(tmp_path / "a.tfrecord", range(2))
    assert run(path, f"--output={tmp_path}") == 2
    assert "would be replaced" in capsys.readouterr().err
    assert ids(path) == [0, 1]
