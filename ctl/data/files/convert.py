"""Converts record files, so that `ctl.data.records` can read them in random order."""

from collections.abc import Iterator
import os
import sys
from typing import Any
import uuid

import numpy as np
import tensorflow as tf

from ctl.data.data_errors import describe_corruption
from ctl.data.files import record_index, record_reader
from ctl.errors import UsageError

_ARRAY_RECORD = "array_record"
_ROWS = 1024  # records read from an ArrayRecord file at a time


def convert(path: str, folder: str, *, output_format: str = "tfrecord") -> tuple[str, int]:
    """Converts one file, and writes the result atomically.

    Args:
        path: a TFRecord file, compressed or not, or an ArrayRecord file.
        folder: where to write; it is created.
        output_format: "tfrecord" or "array_record".

    Returns:
        The path of the new file, and its number of records.

    Raises:
        UsageError: the file is damaged, or would be replaced by the result.
    """
    name = os.path.basename(path)
    for suffix in (".gz", ".zlib", ".array_record", ".tfrecord"):
        name = name.removesuffix(suffix)
    output = os.path.join(folder, f"{name}.{output_format}")
    if output == path:
        raise UsageError(f"{path} would be replaced by the result: choose another --output.")
    tf.io.gfile.makedirs(folder)
    temporary = f"{output}.{uuid.uuid4().hex}.incomplete"  # a name that no one else could choose
    writer = _open_writer(temporary, output_format)
    count = 0
    try:
        for record in _read(path):
            writer.write(record)
            count += 1
    except tf.errors.DataLossError as error:
        raise UsageError(
            f"{path} is damaged after {count} records ({describe_corruption(error)}): write the file "
            "again."
        ) from None
    finally:
        writer.close()
        if sys.exc_info()[0] is not None:
            tf.io.gfile.remove(temporary)
    tf.io.gfile.rename(temporary, output, overwrite=True)
    return output, count


def _read(path: str) -> Iterator[bytes]:
    if record_reader.is_array_record(path):
        reader = record_reader.ArrayRecordReader([path], skip_damaged=False)
        for start in range(0, len(reader), _ROWS):
            yield from reader.read_by_python(np.arange(start, min(start + _ROWS, len(reader))))
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        compression = "GZIP" if record_index.is_gzip(file.read(record_index.HEAD)) else ""
        size = file.size()
    # The first bytes of a zlib file may also be the length of a record, so the name decides.
    compression = "ZLIB" if path.endswith(".zlib") else compression
    for record in tf.data.TFRecordDataset(path, compression).as_numpy_iterator():
        size -= record_index.HEAD + len(record) + record_index.TAIL
        yield record
    # TensorFlow accepts a file that breaks off in the head of a record.
    if size and not compression:
        raise tf.errors.DataLossError(None, None, f"the last {size} bytes are not a record")


def _open_writer(path: str, output_format: str) -> Any:
    if output_format == _ARRAY_RECORD:
        # Groups of one record are the fastest to read in random order.
        return record_reader.import_package().ArrayRecordWriter(path, "group_size:1")
    return tf.io.TFRecordWriter(path)
