"""Sources of examples of variable length."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import ragged
from ctl.data.data_errors import report_data_errors
from tests.data import record_files, token_model
from tests.data.reading import check_data, one_line

LENGTHS = [len(x) for x in token_model.documents()["x"]]


class Own(ctl.data.Source):
    """A user's source."""

    def __init__(self, batch):
        self._batch = batch

    def __len__(self):
        return 3

    def gather(self, indexes):
        return {name: tf.gather(value, indexes) for name, value in self._batch.items()}


class Nested(Own):
    def gather(self, indexes):
        return {"label": super().gather(indexes)}


class Images(token_model.Documents):
    """Images whose width differs, too."""

    def parse(self, row):
        return {"image": tf.zeros([row, row + 1, 3])}


class Padded(Own):
    def gather(self, indexes):
        return {"x": super().gather(indexes)["x"].to_tensor()}


SEQUENCES = ctl.data.sequences({"x": [[1], [2, 3]]})
AUGMENTED = ctl.data.augmented(SEQUENCES, lambda example, seed: example)
BUCKETED = ctl.data.bucketed(SEQUENCES, [4])
UNEQUAL = {"x": [[1], [2]], "y": [[1], [2, 3]]}
ONE_AXIS = ", but only the first axis may differ"
RAGGED = tf.ragged.constant([[1], [2, 3], [4]])


def pack(batch):
    return ctl.data.packed(Own(batch), 4)


def test_features_of_variable_length_are_ragged():
    features = {
        "x": [[1, 2], [], [3]],
        "frames": [np.full([n, 2], n, np.float32) for n in (2, 0, 1)],
        "label": [7, 8, 9],
        "y": tf.ragged.constant([[4, 5], [], [6]]),
        "strings": [[b"a\0", b"b"], [], [b"\0"]],  # with their zero bytes
    }
    source = ctl.data.sequences(features)
    assert len(source) == 3
    assert source.lengths.tolist() == [2, 0, 1]
    batch = source.gather(tf.constant([2, 0], tf.int64))
    assert batch.pop("label").numpy().tolist() == [9, 7]
    assert {name: value.to_list() for name, value in batch.items()} == {
        "x": [[3], [1, 2]],
        "y": [[6], [4, 5]],
        "frames": [[[1, 1]], [[2, 2], [2, 2]]],
        "strings": [[b"\0"], [b"a\0", b"b"]],
    }


@pytest.mark.parametrize("make", [ctl.data.sequences, Own])
def test_ragged_tensors_may_have_32_bit_splits_and_inner_axes(make):
    values = [[[1, 2]], [[3, 4], [5, 6]], []]
    rows = tf.ragged.constant(values, ragged_rank=1, row_splits_dtype=tf.int32)
    source = make({"x": rows})
    packed = ctl.data.packed(source, 3).gather(tf.constant([0], tf.int64))["x"]
    assert sorted(packed.numpy()[0].tolist()) == [[1, 2], [3, 4], [5, 6]]
    bucketed = ctl.data.bucketed(source, [2]).gather(tf.constant([1, 0], tf.int64))["x"]
    assert bucketed.numpy().tolist() == [[[3, 4], [5, 6]], [[1, 2], [0, 0]]]


def test_lengths_that_change_end_the_run_in_one_line():
    source = Own({"x": tf.ragged.constant([[1], [2], [3, 4]])})
    source.lengths = np.array([1, 1, 1])
    rows = tf.data.Dataset.range(1).batch(1).map(ctl.data.packed(source, 3).gather)
    match = "^.*other lengths than when they were grouped.*$"
    with pytest.raises(ctl.UsageError, match=match), report_data_errors("training", dict):
        list(rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ctl.data.sequences([[1]]), "requires a dict of lists"),
        (lambda: ctl.data.sequences({"x": [[1]], "y": [[1], [2]]}), "the same number"),
        (lambda: ctl.data.sequences({"x": [1, 2]}), "got no list of sequences"),
        (lambda: ctl.data.sequences({"x": [[1], ["a"]]}), "cannot convert 'x'"),
        (lambda: ctl.data.sequences({"x": [[1], [[2]]]}), "cannot convert 'x'"),
        (lambda: ctl.data.sequences(UNEQUAL), "Example 1 has 1 values of 'x', but 2 of 'y'"),
        (lambda: pack({"x": tf.ragged.constant([[[1, 2]], [[3]], []])}), f"(None, None){ONE_AXIS}"),
        (lambda: ctl.data.bucketed(Images(), [4]), f"the shape (None, None, 3){ONE_AXIS}"),
        (lambda: check_data(SEQUENCES, "train"), "return ctl.data.packed(source, length)"),
        (lambda: ctl.data.packed(AUGMENTED, 4), "augment its result"),
        (lambda: ctl.data.packed(BUCKETED, 4), "apply ctl.data.packed to each source"),
        (lambda: ctl.data.bucketed(Padded({"x": RAGGED}), [4]), "which the source pads"),
        (lambda: ctl.data.packed({"x": [[1]]}, 4), "got a dict, but requires a ctl.data.Source"),
        (lambda: ctl.data.packed(Nested({"x": RAGGED}), 4), "'label' of the sequences is a dict"),
        (lambda: pack({"x": tf.zeros([3, 2])}), "all have equal shapes: x (2,)"),
        (lambda: pack({"x": tf.ragged.constant([[1]] * 3), "positions": tf.zeros([3])}), "rename"),
    ],
)
def test_wrong_sequences_are_rejected_in_one_line(make, message):
    assert message in one_line(make)


def test_read_slices_copies_from_memory_what_it_reads_from_examples():
    values = {"x": tf.ragged.constant([[1, 2, 3], [4], [5, 6]]), "weight": tf.constant([1.0, 2, 3])}
    arguments = [tf.constant(v, tf.int64) for v in ([2, 0, 0], [1, 0, 2], [1, 2, 1], [2, 3, 3])]
    for source in (ctl.data.sequences(values), Own(values)):
        slices = ragged.read_slices(source, *arguments)
        assert slices["x"].numpy().tolist() == [6, 1, 2, 3]
        assert slices["weight"].numpy().tolist() == [3, 1, 1]


# Lengths, which are read once.


@pytest.fixture
def short_reads(monkeypatch):
    """Reads four rows at a time, so that the lengths need several reads."""
    monkeypatch.setattr(ragged, "_ROWS_PER_READ", 4)


def test_file_keeps_the_lengths(tmp_path, monkeypatch, short_reads):
    path = str(tmp_path / "folder/lengths.npy")
    assert ragged.read_lengths(token_model.Documents(), path).tolist() == LENGTHS
    monkeypatch.setattr(token_model.Documents, "parse", None)  # not called any more
    assert ragged.read_lengths(token_model.Documents(), path).tolist() == LENGTHS
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["lengths.npy"]


def test_lengths_in_memory_are_newer_than_a_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([1, 3]))
    source = ctl.data.sequences({"x": [[1, 2], [3, 4]]})
    assert ragged.read_lengths(source, str(path)).tolist() == [2, 2]


def test_damaged_record_is_reported_in_one_line(tmp_path):
    path = tmp_path / "train.tfrecord"
    record_files.write(path, range(9))
    record_files.flip_bit(path, path.stat().st_size // 2)
    feature = tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)
    message = one_line(ctl.data.packed, ctl.data.records(str(path), {"x": feature}), 16)
    assert "set skip_damaged=True" in message


_HEADER = b"{'descr': '<i8', 'fortran_order': False, 'shape': (35184372088832,)}"
HUGE = b"\x93NUMPY\1\0" + len(_HEADER).to_bytes(2, "little") + _HEADER  # declares 256 TiB


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(3), "lengths of shape (3,), but the data has 40 examples"),
        (np.arange(40.0), "remove the file"),
        (b"text", "is not a file of lengths"),
        (b"", "is not a file of lengths"),
        pytest.param(HUGE, "is not a file of lengths", id="huge"),
    ],
)
def test_wrong_file_of_lengths_is_rejected_in_one_line(tmp_path, content, message):
    path = tmp_path / "lengths.npy"
    np.save(path, content)
    if isinstance(content, bytes):
        path.write_bytes(content)
    assert message in one_line(ragged.read_lengths, token_model.Documents(), str(path))


def test_other_wrong_lengths_are_rejected_in_one_line(tmp_path):
    source = token_model.Documents()
    (tmp_path / "file").touch()
    message = one_line(ragged.read_lengths, source, f"{tmp_path}/file/lengths.npy")
    assert "cannot be written to" in message
    message = "lengths is a list, but must be the path of a file"
    assert message in one_line(ragged.read_lengths, source, LENGTHS)
    source.lengths = np.arange(3)
    assert "must have one per example" in one_line(ragged.read_lengths, source, None)


def test_sequences_of_an_example_must_have_one_length(short_reads):
    class Longer(token_model.Documents):
        def parse(self, row):
            example = super().parse(row)
            return {**example, "label": example["label"][row // 9 :]}

    first = next(i for i, n in enumerate(LENGTHS) if i // 9 and n)
    message = f"Example {first} has {LENGTHS[first]} values of 'x', but {LENGTHS[first] - 1} of"
    with pytest.raises(ctl.UsageError, match=message):
        ragged.read_lengths(Longer(), None)
