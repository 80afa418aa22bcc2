"""The lengths of sequences, which are read once."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.sequences import ragged
from tests.data import record_files, token_model

LENGTHS = [len(x) for x in token_model.documents()["x"]]


def test_lengths_are_read_from_the_examples(monkeypatch):
    monkeypatch.setattr(ragged, "_ROWS_PER_READ", 7)
    assert ragged.read_lengths(token_model.Documents(), None).tolist() == LENGTHS


def test_file_keeps_the_lengths(tmp_path, monkeypatch):
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
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    def parse(record):
        example = tf.io.parse_single_example(record, record_files.FEATURES)
        return {"x": tf.range(example["id"])}

    with pytest.raises(ctl.UsageError, match=r"set data\.skip_damaged=True") as error:
        ctl.data.packed(ctl.data.records(str(path), parse), 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(3), r"lengths of shape \(3,\), but the data has 40 examples"),
        (np.arange(40.0), "remove the file"),
        (b"text", "is not a file of lengths"),
        (b"", "is not a file of lengths"),
    ],
)
def test_wrong_file_is_rejected_in_one_line(tmp_path, content, message):
    path = tmp_path / "lengths.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ctl.UsageError, match=message):
        ragged.read_lengths(token_model.Documents(), str(path))


def test_sequences_of_an_example_must_have_one_length(monkeypatch):
    class Longer(token_model.Documents):
        def parse(self, row):
            example = super().parse(row)
            return {**example, "label": example["label"][row // 9 :]}

    monkeypatch.setattr(ragged, "_ROWS_PER_READ", 4)
    first = next(i for i, n in enumerate(LENGTHS) if i // 9 and n)
    message = f"Example {first} has {LENGTHS[first]} values of 'x', but {LENGTHS[first] - 1} of"
    with pytest.raises(ctl.UsageError, match=message):
        ragged.read_lengths(Longer(), None)


def test_lengths_of_a_source_must_be_one_per_example():
    source = token_model.Documents()
    source.lengths = np.arange(3)
    with pytest.raises(ctl.UsageError, match="must have one per example"):
        ragged.read_lengths(source, None)


def test_path_that_cannot_be_written_is_rejected_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in (
        (str(tmp_path / "file/lengths.npy"), "cannot be written to"),
        (LENGTHS, "lengths is a list, but must be the path of a file"),
    ):
        with pytest.raises(ctl.UsageError, match=message) as error:
            ragged.read_lengths(token_model.Documents(), path)
        assert "\n" not in str(error.value)
