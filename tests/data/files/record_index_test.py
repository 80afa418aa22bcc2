"""Indexes of TFRecord files: what they hold, when they are rebuilt, and where they are kept."""

import concurrent.futures
import os
import pathlib
import zlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.lib.io import tf_record

from ctl.data.files import record_index
from tests.data.reading import one_line
from tests.data.record_files import flip_bit, write


def offsets_by_tensorflow(path):
    """The offsets of all records by TensorFlow's own reader, and the end of the last one."""
    reader, offsets = tf_record.tf_record_random_reader(path), [0]
    while offsets[-1] < os.path.getsize(path):
        offsets.append(reader.read(offsets[-1])[1])
    return offsets


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    """The user's cache folder of a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def count_builds(monkeypatch):
    """Returns a list that grows by the path of each file that is indexed."""
    builds, build = [], record_index._build

    def counting(path, size):
        builds.append(path)
        return build(path, size)

    monkeypatch.setattr(record_index, "_build", counting)
    return builds


@pytest.mark.parametrize("block", [16, 100])
def test_offsets_are_those_of_tensorflow(tmp_path, monkeypatch, block):
    monkeypatch.setattr(record_index, "_LOCAL_BLOCK", block)
    path = write(tmp_path / "a", range(40))
    (index,) = record_index.load([path])
    assert index.offsets.dtype == np.int64
    assert index.offsets.tolist() == offsets_by_tensorflow(path)
    assert index.damaged_at is None


def test_records_of_any_length_are_found(tmp_path):
    path = str(tmp_path / "a")
    lengths = [0, 1, 70_000, 0, 3, 2**16 - 16, 2**16 - 17, 5]
    with tf.io.TFRecordWriter(path) as writer:
        for length in lengths:
            writer.write(b"x" * length)
    (index,) = record_index.load([path])
    assert (np.diff(index.offsets) - 16).tolist() == lengths


def test_index_is_built_once_and_again_if_the_file_changes(tmp_path, monkeypatch):
    builds = count_builds(monkeypatch)
    paths = [write(tmp_path / name, range(5)) for name in "abc"]
    first, second = record_index.load(paths), record_index.load(paths)
    assert sorted(builds) == paths
    assert str(first) == str(second)
    assert sorted(os.listdir(tmp_path / record_index.FOLDER)) == ["a", "b", "c"]
    write(paths[0], range(7))  # another size
    assert len(record_index.load(paths)[0].offsets) == 8
    os.utime(paths[0], ns=(1, 1))  # the same size at another time
    record_index.load(paths)
    record_index.load(paths)
    assert builds[3:] == paths[:1] * 2


def change_offset(path, value):
    """Changes the second offset, and the checksum: someone else may have written the index."""
    numbers = np.frombuffer(path.read_bytes(), "<i8").copy()
    numbers[7] = value
    numbers[5] = zlib.crc32(numbers[6:].tobytes())
    path.write_bytes(numbers.tobytes())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip_bit(path, -3),
        lambda path: flip_bit(path, 8),  # the version
        lambda path: os.truncate(path, 91),
        lambda path: os.truncate(path, 0),
        lambda path: change_offset(path, 2**60),
        lambda path: change_offset(path, -64),
        lambda path: change_offset(path, 0),
    ],
)
def test_damaged_index_is_built_again(tmp_path, monkeypatch, damage):
    path = write(tmp_path / "a", range(5))
    expected = record_index.load([path])[0].offsets.tolist()
    damage(tmp_path / record_index.FOLDER / "a")
    builds = count_builds(monkeypatch)
    for _ in range(2):
        assert record_index.load([path])[0].offsets.tolist() == expected
        assert builds == [path]


def test_index_is_in_the_cache_folder_if_the_data_cannot_be_written(
    tmp_path, user_cache, monkeypatch
):
    builds = count_builds(monkeypatch)
    path = write(tmp_path / "a", range(5))
    (tmp_path / record_index.FOLDER).write_text("a file in place of the folder")
    for _ in range(2):
        assert len(record_index.load([path])[0].offsets) == 6
    assert builds == [path]
    assert len(os.listdir(user_cache / "ctl" / "records")) == 1


def test_index_folder_may_be_chosen(tmp_path):
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / "a", range(5)), write(tmp_path / "b" / "a", range(3))]
    for _ in range(2):
        counts = [len(i.offsets) - 1 for i in record_index.load(paths, str(tmp_path / "indexes"))]
        assert counts == [5, 3]
    assert len(os.listdir(tmp_path / "indexes")) == 2
    assert not (tmp_path / record_index.FOLDER).exists()
    (tmp_path / "file").write_text("not a folder")  # an index that cannot be written is still used
    assert len(record_index.load(paths[:1], str(tmp_path / "file"))[0].offsets) == 6


def test_threads_may_build_the_same_index_at_once(tmp_path):
    path = write(tmp_path / "a", range(200))

    def load_and_remove(_):
        (index,) = record_index.load([path])
        (tmp_path / record_index.FOLDER / "a").unlink(missing_ok=True)
        return len(index.offsets)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(load_and_remove, range(200))) == {201}
    assert set(os.listdir(tmp_path / record_index.FOLDER)) <= {"a"}  # no temporary file


def test_truncated_file_ends_at_its_last_complete_record(tmp_path):
    path = write(tmp_path / "a", range(5))
    offsets = offsets_by_tensorflow(path)
    content = pathlib.Path(path).read_bytes()
    # Around the parts of a record: its length and the checksum of that, the data and its checksum.
    sizes = {offset + part for offset in offsets[:-1] for part in (1, 7, 8, 11, 12, 13)}
    for size in sizes | {offset - part for offset in offsets[1:] for part in (0, 1, 3, 4, 5)}:
        (tmp_path / "b").write_bytes(content[:size])
        (index,) = record_index.load([str(tmp_path / "b")])
        complete = sum(offset <= size for offset in offsets)
        assert index.offsets.tolist() == offsets[:complete]
        assert index.damaged_at == (None if size in offsets else offsets[complete - 1])


@pytest.mark.parametrize("byte", [0, 11])
def test_damaged_length_ends_the_records(tmp_path, byte):
    path = write(tmp_path / "a", range(5))
    offsets = offsets_by_tensorflow(path)
    flip_bit(path, offsets[2] + byte)
    (index,) = record_index.load([path])
    assert index.offsets.tolist() == offsets[:3]
    assert index.damaged_at == offsets[2]


def test_compressed_and_empty_files_are_rejected(tmp_path):
    path = write(tmp_path / "a", range(5), tf.io.TFRecordOptions("GZIP"))
    message = one_line(record_index.load, [path])
    assert "is compressed" in message and "ctl convert" in message
    (tmp_path / "b").touch()
    assert "is empty" in one_line(record_index.load, [str(tmp_path / "b")])


def test_progress_is_shown_if_it_takes_long(tmp_path, monkeypatch, capsys):
    paths = [write(tmp_path / name, range(5)) for name in "ab"]
    record_index.load(paths)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(record_index, "_PROGRESS_SECONDS", -1.0)
    record_index.load(paths)
    assert capsys.readouterr().err.startswith("Indexing records: 1 of 2 files, 0 s\nIndexing")
