"""Parsed examples in memory or in a folder: the same batches, written once, never half written."""

import os
import shutil
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.data import cache
from ctl.data.kinds import kind_of
from tests.data import image_records, record_files
from tests.data.image_records import parse_image
from tests.data.reading import one_line, pipeline_layouts, read_steps
from tests.support import child, reference_model

pytest.importorskip("array_record", reason="array-record is not installed: the extra arrayrecord")


def augment(example, seed):
    image = tf.image.stateless_random_crop(example["image"], [8, 8, 3], seed)
    flipped = tf.image.stateless_random_flip_left_right(image, seed)
    return {**example, "image": flipped, "wide": tf.reduce_sum(example["wide"])}


def parse_small(record):
    example = tf.io.parse_single_example(record, record_files.FEATURES)
    return {**example, "x": example["x"] * 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    image_records.write_images(folder / "images.tfrecord")
    record_files.write_files(folder, files=2, per_file=10)
    return folder


def small(folder, parse=parse_small, version="1"):
    return ctl.data.records(f"{folder}/train-*.tfrecord", parse, version=version)


def images(folder):
    return ctl.data.records(f"{folder}/images.tfrecord", parse_image, version="1")


def read(data, replicas, start):
    """The elements of all replicas."""
    layouts = pipeline_layouts(7, replicas, replicas)
    streams = [kind_of(data).training(x, seed=5, start=start) for x in layouts]
    return read_steps(streams, layouts[0], 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "small", "features"])
def test_batches_are_those_without_a_cache(folder, tmp_path, kind):
    source, change = small(folder), lambda e, seed: {**e, "seed": seed}
    place, name = "memory", "CachedArrays"
    if kind == "images":
        source, change, place, name = images(folder), augment, str(tmp_path), "CachedRecords"
    if kind == "features":
        source = ctl.data.records(f"{folder}/train-*.tfrecord", record_files.FEATURES)
    for replicas, start in [(1, 0), (2, 100)]:
        copy = cache.cached(source, place)  # at the second time, it reads the file of the first
        assert type(copy).__name__ == name
        plain = read(ctl.data.augmented(source, change), replicas, start)
        cached = read(ctl.data.augmented(copy, change), replicas, start)
        tf.nest.map_structure(np.testing.assert_array_equal, plain, cached)


class Reversed(ctl.data.Source):
    """Reads its examples from the last one to the first, also in an evaluation; names no files."""

    def __len__(self):
        return 10

    def gather(self, indexes):
        return {"x": indexes}

    def order(self, positions, *, seed, span):
        return 9 - positions % 10

    def evaluation_order(self, positions, *, batch_size):
        return 9 - positions


def test_order_of_a_source_is_kept():
    source = cache.cached(Reversed(), "memory")
    positions = tf.range(10, dtype=tf.int64)
    indexes, _ = source.training_order(positions, batch_size=5, seed=0, span=10)
    for each in (indexes, source.evaluation_order(positions, batch_size=5)):
        assert source.gather(each)["x"].numpy().tolist() == [*range(9, -1, -1)]


DTYPES = (
    tf.bool, tf.uint8, tf.float16, tf.bfloat16, tf.uint32, tf.uint64, tf.complex64, tf.string,
)  # fmt: skip


class Numbers(ctl.data.RowSource):
    """Examples of every type, of one shape or of other shapes, and targets of a dict."""

    files, version = [__file__], "1"

    def __init__(self, is_ragged):
        self.is_ragged = is_ragged

    def __len__(self):
        return 5

    def read(self, indexes):
        return indexes

    def parse(self, row):
        x = tf.range(row) if self.is_ragged else tf.stack([row, 1])
        values = {dtype.name: self.cast(x, dtype) for dtype in DTYPES}
        return {**values, "label": {"part": -x, "number": row}}

    def cast(self, numbers, dtype):
        if dtype == tf.string:
            return tf.strings.as_string(numbers)
        return tf.cast(tf.cast(numbers, tf.float32), dtype)


@pytest.mark.parametrize("is_ragged", [True, False])
def test_every_type_and_targets_of_a_dict_are_kept(tmp_path, is_ragged):
    source = Numbers(is_ragged)
    copy = ctl.data.cached(source, str(tmp_path) if is_ragged else "memory")
    for index in tf.range(5, dtype=tf.int64)[:, tf.newaxis]:
        expected, actual = source.gather(index), copy.gather(index)
        assert actual["bfloat16"].dtype == tf.bfloat16
        for one, other in zip(*map(tf.nest.flatten, (actual, expected)), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        tf.nest.assert_same_structure(actual, expected)


def entries(folder):
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def test_a_folder_is_written_once_and_again_for_another_version_or_file(folder, tmp_path):
    place, data = str(tmp_path / "cache"), tmp_path / "data"
    shutil.copytree(folder, data)
    factor = 3.0

    def parse(record):
        return {**parse_small(record), "x": parse_small(record)["x"] * factor}

    def first(version):
        copy = cache.cached(small(data, parse, version), place)
        return copy.gather(tf.constant([0], tf.int64))["x"].numpy().tolist()

    before = first("1")
    factor = 5.0
    assert first("1") == before and len(entries(place)) == 1
    after = first("2")
    assert after != before and len(entries(place)) == 2
    record_files.write(data / "train-00.tfrecord", range(50, 60))
    assert first("2") != after and len(entries(place)) == 3
    os.utime(data / "train-00.tfrecord", (1, 1))
    first("2")
    assert len(entries(place)) == 4


def test_features_are_a_version_by_themselves(folder, tmp_path):
    for default in (None, None, [0, 1]):
        features = {**record_files.FEATURES, "x": tf.io.FixedLenFeature([2], tf.float32, default)}
        ctl.data.cached(small(folder, features, None), str(tmp_path))
    assert len(entries(tmp_path)) == 2


FILL = """
import os, sys, time
from ctl.data import cache
from tests.data import cache_test
folder, place, speed = sys.argv[1:]
def stop(*arguments):
    yield [b"first record"]
    print("writing", flush=True)
    time.sleep(60)
if speed == "stop":
    cache._read = stop
cache.cached(cache_test.small(folder), place)
print("done", len(os.listdir(place)), flush=True)
"""


def test_a_missing_package_is_named_in_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    message = one_line(cache.cached, small(folder), str(tmp_path))
    assert "pip install array-record" in message and "data.cache in a folder" in message


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_is_read(folder, tmp_path):
    process = child.start(["-c", FILL, str(folder), str(tmp_path), "stop"], fork=True)
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate()
    assert [name for name in entries(tmp_path) if name.endswith(".incomplete")]
    copy = cache.cached(small(folder), str(tmp_path))
    np.testing.assert_array_equal(
        copy.gather(tf.constant([19], tf.int64))["x"],
        small(folder).gather(tf.constant([19], tf.int64))["x"],
    )
    assert not [name for name in entries(tmp_path) if name.endswith(".incomplete")]


@pytest.mark.slow
def test_two_processes_fill_one_folder(folder, tmp_path):
    command = ["-c", FILL, str(folder), str(tmp_path), "fast"]
    processes = [child.start(command, fork=True) for _ in range(2)]
    outputs = sorted(process.communicate()[0] for process in processes)
    assert outputs == ["Filling data.cache with 20 examples.\ndone 2\n", "done 2\n"]
    assert len(entries(tmp_path)) == 1


def test_an_error_while_writing_leaves_no_cache(folder, tmp_path, monkeypatch):
    package = cache.import_package()

    def open_full(path, options):  # the device that is always full
        return package.ArrayRecordWriter("/dev/full", options)

    with monkeypatch.context() as patch:
        patch.setattr(
            cache, "import_package", lambda: types.SimpleNamespace(ArrayRecordWriter=open_full)
        )
        assert "No space left" in one_line(cache.cached, small(folder), str(tmp_path))
    assert entries(tmp_path) == []
    path = shutil.copy(f"{folder}/images.tfrecord", tmp_path)
    record_files.flip_bit(path, 300)
    assert "cached data is corrupt" in one_line(cache.cached, images(tmp_path), str(tmp_path))


def test_a_cache_with_replaced_records_does_not_hide_the_damage(tmp_path):
    path = record_files.write(tmp_path / "train-00.tfrecord", range(10))
    record_files.flip_bit(path, 20)
    skipping = ctl.data.records(path, parse_small, skip_damaged=True, version="1")
    copy = cache.cached(skipping, str(tmp_path))
    assert copy.gather(tf.constant([0], tf.int64))["id"].numpy().tolist() == [1]
    assert "damaged record at offset 0" in one_line(cache.cached, small(tmp_path), str(tmp_path))


def ragged():
    return ctl.data.sequences({"x": [[1], [2, 3]]})


def of_feature(feature):
    return lambda folder: small(folder, {"x": feature})


@pytest.mark.parametrize(
    ("make", "place", "message"),
    [
        (lambda folder: Reversed(), "cache", "but Reversed lacks `files` or `version`"),
        (lambda folder: small(folder, version=None), "cache", "lacks `files` or `version`"),
        (lambda folder: ctl.data.bucketed(ragged(), [2, 4]), "memory", "not support Bucketed"),
        (of_feature(tf.io.VarLenFeature(tf.float32)), "memory", "but 'x' is Sparse"),
        (of_feature(tf.io.FixedLenFeature([0], tf.float32)), "memory", "but 'x' is TensorSpec"),
        (images, "memory", "of one shape with values, but 'image' is"),
        (small, "file", "choose a folder on a local disk"),
        (small, "gs://a/b", "data.cache is gs://a/b, but ctl does not support URLs"),
    ],
)
def test_unsupported_source_is_rejected_in_one_line(folder, tmp_path, make, place, message):
    (tmp_path / "file").touch()
    place = str(tmp_path / place) if place in ("cache", "file") else place
    assert message in one_line(ctl.data.cached, make(folder), place)


def test_other_data_is_kept_or_rejected_in_one_line(folder, tmp_path):
    for source in (ctl.data.arrays({"x": [1, 2]}), ragged()):  # already in memory
        assert ctl.data.cached(source, "memory") is source
        assert ctl.data.cached(source, str(tmp_path)) is source
    source = Reversed()
    assert ctl.data.cached(source, "") is source
    message = one_line(cache.cache_data, kind_of(tf.data.Dataset.range(3)), "memory")
    assert "Dataset: set data.cache='' and call cache" in message
    copy = cache.cached(small(folder), str(tmp_path))
    assert "run on other hosts" in one_line(copy.without_python)
    message = one_line(ctl.TrainerOptions, cache="none")
    assert "cache is none, but must be memory, a folder" in message


def test_the_option_applies_to_training_and_evaluation(folder, tmp_path):
    class FromRecords(reference_model.ReferenceTrainer):
        weighted = False

        @staticmethod
        def data_factory(split):
            def parse(record):
                example = parse_small(record)
                x = tf.cast(tf.tile(example["x"], [2]), tf.float64)
                return {"x": x / 50, "token": example["id"] % 6, "label": example["id"] % 3}

            data = small(folder, parse)
            return ctl.data.augmented(data, lambda e, seed: e) if split == "train" else data

    strategy = testing.make_strategy(1)
    trainer = reference_model.make_trainer(strategy, 7, cls=FromRecords, cache=str(tmp_path))
    pipeline = loop_of(trainer).pipeline
    assert all(
        isinstance(pipeline.data(split).source, cache.CachedRecords) for split in ("train", "eval")
    )
    assert pipeline.data("train").augment is not None
    assert len(entries(tmp_path)) == 1  # both splits have the same files and version
