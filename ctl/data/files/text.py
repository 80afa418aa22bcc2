"""Text files as examples: one per line, or one per block of bytes."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ctl.data.files.record_index import find_files
from ctl.data.source import Arrays, Source
from ctl.errors import UsageError


def text(files: str | Sequence[str], *, length: int | None = None) -> Source:
    """Returns the lines of text files, or blocks of their bytes, held in memory.

        ctl.data.text("corpus/*.txt")               # {"text": a line without its end, a string}
        ctl.data.text("corpus/*.txt", length=256)   # {"x": 256 bytes, "label": the bytes after each}

    Args:
        files: paths or patterns of paths. Their bytes are held in memory once.
        length: the bytes of a block. Block i has the int32 features `x`, the bytes
            [i length, (i + 1) length) of all files one after the other, and `label`, the same shifted
            by one byte, for a model of the next byte. Bytes at the end that do not fill a block are
            not used. None: lines; an empty line is an example, too.

    Raises:
        UsageError: a file is missing, or there are no lines or too few bytes.
    """
    contents = []
    for path in find_files(files):
        with tf.io.gfile.GFile(path, "rb") as file:
            contents.append(file.read())
    if length is None:
        lines = [line for content in contents for line in _split_lines(content)]
        if not lines:
            raise UsageError(f"{files} has no lines, but must have at least one.")
        return Arrays({"text": np.array(lines, object)})
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UsageError(f"ctl.data.text got length={length!r}, but requires at least 1 byte.")
    content = b"".join(contents)
    if len(content) <= length:
        raise UsageError(
            f"{files} has {len(content)} bytes, but must have at least length + 1 = {length + 1}."
        )
    return ByteBlocks(content, length)


class ByteBlocks(Source):
    """Blocks of consecutive bytes, and for each byte the one after it.

    Args:
        content: the text, which is copied into a tensor.
        length: bytes in a block.
    """

    def __init__(self, content: bytes, length: int):
        self._length = length
        self._count = (len(content) - 1) // length
        self.row_bytes = 2 * length * tf.int32.size
        with tf.init_scope(), tf.device("CPU:0"):
            self._content = tf.constant(np.frombuffer(content, np.uint8))

    def __len__(self) -> int:
        """The number of blocks."""
        return self._count

    def gather(self, indexes: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads blocks."""
        places = indexes[:, tf.newaxis] * self._length + tf.range(self._length + 1, dtype=tf.int64)
        values = tf.cast(tf.gather(self._content, places), tf.int32)
        return {"x": values[:, :-1], "label": values[:, 1:]}


def _split_lines(content: bytes) -> list[bytes]:
    """Splits at line feeds, and removes carriage returns before them; the last line may have no end."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]
