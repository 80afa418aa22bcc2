"""ctl.data.records: record files as sources with random access."""

import os

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import batching, sampler
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from ctl.errors import Failure
from tests.data.reading import (
    UNEVEN,
    check_rows_and_padding,
    one_line,
    pipeline_layouts,
    read_all,
    read_epoch,
    read_steps,
    real_ids,
)
from tests.data.record_files import FEATURES, flip_bit, write, write_files

FILES, PER_FILE = 4, 25
COUNT = FILES * PER_FILE


def parse(record):
    return tf.io.parse_single_example(record, FEATURES)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    """Four files of 25 examples."""
    return write_files(tmp_path_factory.mktemp("records"), FILES, PER_FILE)


@pytest.fixture(params=["features", "function", "features in graph", "function in graph"])
def source(request, pattern):
    """The same examples by features and by a function, read by Python and by TensorFlow."""
    read = ctl.data.records(pattern, FEATURES if "features" in request.param else parse)
    return read.without_python() if "graph" in request.param else read


def test_gather_reads_records_by_their_number(source):
    indexes = [99, 0, 25, 24, 25, 74, 75, 50, 49]
    for gather in (source.gather, tf.function(source.gather)):
        batch = gather(tf.constant(indexes, tf.int64))
        assert len(source) == COUNT
        assert batch["id"].numpy().tolist() == indexes
        assert batch["x"].numpy().tolist() == [[2 * i + 0.5, 2 * i + 1.5] for i in indexes]


def test_batches_are_those_of_the_sampler_on_any_replicas(source):
    steps, start, seed = 4, 61, 11
    layouts, batch = pipeline_layouts(*UNEVEN), UNEVEN[0]
    positions = tf.range(start * batch, (start + steps) * batch, dtype=tf.int64)
    expected = sampler.example_indexes(positions, count=COUNT, seed=seed, span=steps * batch)
    read = read_steps(
        [kind_of(source).training(x, seed=seed, start=start, prefetch=1) for x in layouts],
        layouts[0],
        steps,
    )
    for step, ids in zip(read, expected.numpy().reshape(steps, batch).tolist(), strict=True):
        assert real_ids(step) == ids
        check_rows_and_padding(step, layouts[0], batch)


def test_evaluation_reads_every_record_once(source):
    layout = Layout(7, 2)
    steps = kind_of(source).steps(layout)
    read = read_steps([kind_of(source).evaluation(layout, prefetch=1)], layout, steps)
    assert [i for step in read for i in real_ids(step)] == list(range(COUNT))


@pytest.mark.parametrize("large_row", [0, pytest.param(2**30, marks=pytest.mark.slow)])
def test_augmentation_of_a_record_depends_on_seed_epoch_and_example(
    pattern, monkeypatch, large_row
):
    """Whether rows are mapped one by one or a chunk at a time; compared with arrays."""
    monkeypatch.setattr(batching, "_LARGE_ROW", large_row)

    def add_noise(example, seed):
        return {**example, "x": example["x"] + tf.random.stateless_normal([2], seed)}

    numbers = np.arange(COUNT)
    x = np.stack([2 * numbers + 0.5, 2 * numbers + 1.5], axis=1).astype(np.float32)
    arrays = ctl.data.arrays({"id": numbers, "x": x})

    def read(source, start):
        data, layouts = ctl.data.augmented(source, add_noise), pipeline_layouts(9, 2, 2)
        streams = [kind_of(data).training(x, seed=1, start=start) for x in layouts]
        return read_steps(streams, layouts[0], 12 - start)

    expected = read(arrays, 0)
    for parser, start in ((parse, 8), (FEATURES, 0)):
        actual = read(ctl.data.records(pattern, parser), start)
        tf.nest.map_structure(np.testing.assert_array_equal, expected[start:], actual)


def test_parse_may_return_a_tuple(pattern):
    source = ctl.data.records(pattern, lambda record: (record, tf.strings.length(record)))
    assert set(source.gather(tf.constant([0], tf.int64))) == {"x", "label"}


def test_features_of_variable_length_are_parsed_one_by_one(tmp_path):
    path = write(tmp_path / "a", range(3))
    feature = tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)
    source = ctl.data.records(path, {"x": feature})
    assert isinstance(source, ctl.data.RowSource)
    assert source.gather(tf.constant([2], tf.int64))["x"].numpy().tolist() == [[4.5, 5.5]]


def test_several_patterns_and_an_index_folder(tmp_path):
    files = [write(tmp_path / name, numbers) for name, numbers in (("b", [0, 1]), ("a", [2]))]
    source = ctl.data.records(files, FEATURES, index_dir=str(tmp_path / "indexes"))
    assert read_all(source)["id"].numpy().tolist() == [0, 1, 2]
    assert os.listdir(tmp_path / "indexes") != []
    # The folder of the indexes is not a record file.
    ctl.data.records(files, FEATURES)
    assert len(ctl.data.records(f"{tmp_path}/*", FEATURES)) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("nothing-*", "ctl.data.records finds no file that matches 'nothing-*'"),
        ([], "at least one file"),
        (["{a}", "{a}"], "a 2 times: name each file once"),
        (["{a}", "{b}"], "TFRecord and ArrayRecord files"),
    ],
)
def test_wrong_files_are_rejected_in_one_line(tmp_path, files, message):
    names = dict(a=write(tmp_path / "a", [1]), b=write(tmp_path / "b.array_record", [1]))
    files = files if isinstance(files, str) else [name.format(**names) for name in files]
    assert message in one_line(ctl.data.records, files, FEATURES)


# Damage.


def damage_record(folder, number):
    """Changes a byte of the data of a record; returns its file and its offset."""
    pattern = write_files(folder, 2, 10)
    path = tf.io.gfile.glob(pattern)[number // 10]
    source = ctl.data.records(pattern, FEATURES)
    offset = int(source.reader.offsets[number + number // 10])
    flip_bit(path, offset + 20)
    return pattern, path, offset


def test_damaged_record_is_one_line_with_file_and_offset(tmp_path):
    pattern, path, offset = damage_record(tmp_path, 13)
    source = ctl.data.records(pattern, FEATURES)
    message = f"The training data is corrupt: {path} has a damaged record at offset {offset}: write"
    assert one_line(read_epoch, source).startswith(message)
    assert one_line(read_epoch, ctl.data.records(pattern, parse)).startswith(message)
    assert "corrupt (corrupted record at" in one_line(read_epoch, source.without_python())


def test_skipped_record_is_replaced_by_the_next_one(tmp_path, caplog):
    pattern, path, offset = damage_record(tmp_path, 19)  # the last one: the next is the first
    source = ctl.data.records(pattern, FEATURES, skip_damaged=True)
    ids = read_epoch(source)
    assert sorted(ids) == [0, 0, *range(1, 19)]
    assert len(source) == 20
    assert source.reader.skipped == {19}
    assert f"{path} has a damaged record at offset {offset}: it is skipped" in caplog.text
    assert read_epoch(source) == ids
    assert caplog.text.count("damaged record") == 1


def test_truncated_file_is_rejected_or_read_up_to_its_end(tmp_path, caplog):
    pattern = write_files(tmp_path, 2, 10)
    path = tf.io.gfile.glob(pattern)[0]
    with open(path, "rb+") as file:
        file.truncate(os.path.getsize(path) - 3)
    message = one_line(ctl.data.records, pattern, FEATURES)
    assert f"{path} is truncated or damaged at offset" in message
    assert "to use the 9 records before it" in message
    source = ctl.data.records(pattern, FEATURES, skip_damaged=True)
    assert sorted(read_all(source)["id"].numpy()) == [*range(9), *range(10, 20)]
    assert "cannot be read and are skipped" in caplog.text


def test_file_that_changes_during_the_run_is_damaged(tmp_path):
    pattern = write_files(tmp_path, 2, 10)
    source = ctl.data.records(pattern, FEATURES)
    write(tf.io.gfile.glob(pattern)[0], [1])
    assert "damaged record at offset" in one_line(read_epoch, source)


def test_file_that_is_removed_before_it_is_read_is_one_line(tmp_path):
    path = write(tmp_path / "a", range(4))
    source = ctl.data.records(path, FEATURES)
    os.remove(path)
    with pytest.raises(Failure, match=f"^{path} cannot be read: No such file or directory.$"):
        next(iter(ctl.data.distribute(source, 2)))


def test_file_of_another_format_is_rejected(tmp_path):
    (tmp_path / "a").write_bytes(b"404 Not Found: there is no such file here")
    path = str(tmp_path / "a")
    assert "damaged at offset 0" in one_line(ctl.data.records, path, FEATURES)
    assert "has no records" in one_line(ctl.data.records, path, FEATURES, skip_damaged=True)


def test_skipping_requires_reading_by_python(pattern):
    source = ctl.data.records(pattern, FEATURES, skip_damaged=True)
    gather = source.without_python().gather
    message = one_line(gather, tf.constant([0], tf.int64))
    assert "skip_damaged=True requires an input pipeline that does not run on a remote" in message


@pytest.mark.parametrize(
    ("feature", "line"),
    [
        (tf.io.FixedLenFeature([2], tf.int64), "is float32 in the records and int64 in the schema"),
        (tf.io.FixedLenFeature([4], tf.float32), "has another length in example "),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_schema_that_does_not_fit_the_records_is_named(feature, line, together, pattern):
    schema = {"x": feature}
    parse = schema if together else lambda record: tf.io.parse_single_example(record, schema)
    data = ctl.data.distribute(ctl.data.records(pattern, parse), 2)
    message = one_line(lambda: next(iter(data)))
    assert message.startswith("4 files, digest ") and f"the feature x {line}" in message
    assert message.endswith(": correct the schema.")
