"""What a run records of its data: numbers of examples, names and sizes of files, and indexes."""

import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import description
from ctl.data.cache import cached
from ctl.data.description import describe_files
from ctl.data.kinds import kind_of
from tests.data import record_files
from tests.support import child


def describe(data):
    return description.describe(kind_of(data))


def arrays(count):
    return ctl.data.arrays({"x": np.arange(count)})


def sequences(*lengths):
    return ctl.data.sequences({"x": [list(range(length)) for length in lengths]})


def records(folder):
    return ctl.data.records(str(folder / "*.tfrecord"), record_files.FEATURES)


def test_examples_of_every_kind_of_data_are_counted():
    augmented = ctl.data.augmented(arrays(5), lambda example, seed: example)
    assert describe(augmented) == {"examples": 5}
    dataset = tf.data.Dataset.range(6)
    assert describe(dataset) == {"examples": 6}
    assert describe(dataset.repeat()) == {"examples": "unknown"}
    assert describe(ctl.data.GlobalBatches(dataset.batch(2))) == {"batches": 3}
    mixture = ctl.data.mixture({"a": (arrays(5), 0.5), "b": (arrays(7), 0.5)})
    assert describe(mixture) == {"examples": 12, "sources": [5, 7]}


@pytest.mark.parametrize(
    "group", [lambda s: ctl.data.bucketed(s, [8]), lambda s: ctl.data.packed(s, 8)]
)
def test_lengths_of_sequences_belong_to_the_index(group):
    one, same, other = (describe(group(sequences(*n))) for n in ((5, 6), (5, 6), (6, 5)))
    assert one == same and one["index"] != other["index"]


def test_files_that_are_moved_or_touched_are_the_same_and_others_are_not(tmp_path):
    (tmp_path / "a").mkdir()
    pattern = record_files.write_files(tmp_path / "a", 2, 3)
    before = describe(ctl.data.records(pattern, record_files.FEATURES))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "a").glob("*.tfrecord"))]
    files = f"train-00.tfrecord ({sizes[0]} bytes), train-01.tfrecord ({sizes[1]} bytes)"
    assert before["files"] == files
    shutil.move(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").glob("*.tfrecord"):
        path.touch()
    assert describe(records(tmp_path / "b")) == before
    assert describe(cached(records(tmp_path / "b"), "memory")) == before
    (tmp_path / "b/train-01.tfrecord").rename(tmp_path / "b/train-02.tfrecord")
    assert describe(records(tmp_path / "b"))["files"] != before["files"]


def test_records_that_begin_elsewhere_in_a_file_of_the_same_size_change_the_index(tmp_path):
    described = []
    for name, numbers in {"a": [1, 2], "b": [2, 1]}.items():
        (tmp_path / name).mkdir()
        record_files.write(tmp_path / name / "x.tfrecord", numbers)
        described.append(describe(records(tmp_path / name)))
    assert described[0]["files"] == described[1]["files"]
    assert described[0]["index"] != described[1]["index"]


def test_files_that_are_read_into_memory_are_recorded(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,2\n")
    (tmp_path / "a.txt").write_text("abcdef\n")
    assert describe(ctl.data.csv(str(tmp_path / "*.csv")))["files"] == "a.csv (12 bytes)"
    for length in (None, 2):
        source = ctl.data.text(str(tmp_path / "a.txt"), length=length)
        assert describe(source)["files"] == "a.txt (7 bytes)"
    mnist = ctl.data.idx(child.ROOT / "experiments/data/mnist", "eval")
    assert "t10k-images" in describe(mnist)["files"]


def test_many_files_have_a_digest_and_a_missing_or_remote_one_has_no_size(tmp_path):
    paths = [str(tmp_path / f"{i}.txt") for i in range(4)]
    for path in paths:
        pathlib.Path(path).write_text("a")
    before = describe_files(paths)
    assert before.startswith("4 files, digest ")
    (tmp_path / "2.txt").write_text("aa")
    assert describe_files(paths) != before
    assert describe_files([str(tmp_path / "none"), "gs://bucket/x"]).endswith("gs://bucket/x")
    assert describe_files(["gs://bucket/x"]) == "x"
