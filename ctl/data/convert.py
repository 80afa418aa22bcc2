"""Converts record files, so that `ctl.data.records` can read them in random order.

    python -m ctl.data.convert "data/train-*.tfrecord.gz" --output=data/plain
    python -m ctl.data.convert "data/train-*" --output=data/arrays --format=array_record

Compressed TFRecord files are written uncompressed to another folder, under the same names without
`.gz` or `.zlib`. `--format=array_record` writes ArrayRecord files (the package array-record), and
ArrayRecord files become TFRecord files.
"""

import argparse
from collections.abc import Iterator, Sequence
import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.files import record_index, record_reader
from ctl.errors import UsageError

USER_ERROR = 2
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
    temporary = f"{output}.incomplete"
    writer = _open_writer(temporary, output_format)
    count = 0
    try:
        for record in _read(path):
            writer.write(record)
            count += 1
    except tf.errors.DataLossError as error:
        problem = error.message.splitlines()[0]
        raise UsageError(
            f"{path} is damaged after {count} records ({problem}): write the file again."
        ) from None
    finally:
        writer.close()
        if sys.exc_info()[0] is not None:
            tf.io.gfile.remove(temporary)
    tf.io.gfile.rename(temporary, output, overwrite=True)
    return output, count


def main(argv: Sequence[str]) -> int:
    """Converts the files of the command line; returns the exit code: 0 done, 2 user error."""
    parser = argparse.ArgumentParser(prog="ctl.data.convert", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="paths or patterns")
    parser.add_argument("--output", required=True, help="the folder of the new files")
    parser.add_argument("--format", choices=("tfrecord", _ARRAY_RECORD), default="tfrecord")
    flags = parser.parse_args(argv[1:])
    try:
        paths = record_index.find_files(flags.files)
        for number, path in enumerate(paths, start=1):
            output, count = convert(path, flags.output, output_format=flags.format)
            print(f"{number} of {len(paths)}: {output}, {count} records", flush=True)
    except UsageError as error:
        print("ctl.data.convert:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return USER_ERROR
    return 0


def _read(path: str) -> Iterator[bytes]:
    if record_reader.is_array_record(path):
        reader = record_reader.ArrayRecordReader([path], skip_damaged=False)
        for start in range(0, len(reader), _ROWS):
            yield from reader.read_by_python(np.arange(start, min(start + _ROWS, len(reader))))
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        compression = "GZIP" if file.read(2) == b"\x1f\x8b" else ""
    # The first bytes of a zlib file may also be the length of a record, so the name decides.
    compression = "ZLIB" if path.endswith(".zlib") else compression
    yield from tf.data.TFRecordDataset(path, compression).as_numpy_iterator()


def _open_writer(path: str, output_format: str) -> Any:
    if output_format == _ARRAY_RECORD:
        # Groups of one record are the fastest to read in random order.
        return record_reader.import_package().ArrayRecordWriter(path, "group_size:1")
    return tf.io.TFRecordWriter(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
