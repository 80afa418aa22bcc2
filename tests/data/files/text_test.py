"""ctl.data.text: lines, and blocks of bytes."""

import numpy as np
import pytest
import tensorflow as tf

import ctl


def read_all(source):
    return source.gather(tf.range(len(source), dtype=tf.int64))


def test_lines_are_examples(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\r\nthr\xc3\xa9e")
    (tmp_path / "b.txt").write_bytes(b"four\n")
    lines = read_all(ctl.data.text(str(tmp_path / "*.txt")))["text"].numpy().tolist()
    assert lines == [b"one", b"", b"two", "thrée".encode(), b"four"]


@pytest.mark.parametrize("length", [1, 4, 9])
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
    with pytest.raises(ctl.UsageError) as error:
        ctl.data.text(str(tmp_path / "a"), length=length)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
