"""Examples of CSV, Parquet and text files, in memory or read by blocks.

The package pyarrow (the extra `arrow`) is imported when the first file is read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.files.record_index import find_files, open_file
from ctl.data.memory import check_columns, make_column
from ctl.data.source import Arrays, Source
from ctl.errors import UsageError
from ctl.hardware import host

_BYTES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}  # of a value in Parquet
Columns = Sequence[str] | Mapping[str, str]  # of a file, or name of a feature -> column


def csv(files: str | Sequence[str], *, columns: Columns | None = None) -> Arrays:
    """Reads CSV files with a header line into memory, by the package pyarrow.

        return ctl.data.csv("data/part-*.csv", columns={"x": "height", "label": "class"})

    Args:
        files: paths or patterns of paths.
        columns: the columns that become features, or a dict of feature -> column; None: all. Whether a
            column "weight" is a feature or the weight of the losses must be named by a dict.

    Raises:
        UsageError: pyarrow is missing, or a file cannot be read.
    """
    pyarrow = _import_pyarrow("csv")
    options = pyarrow.csv.ConvertOptions(include_columns=_names(columns))
    read = lambda file: pyarrow.csv.read_csv(file, convert_options=options)  # noqa: E731
    return _read_tables(find_files(files, "ctl.data.csv"), read, pyarrow, columns)


def parquet(files: str | Sequence[str], *, columns: Columns | None = None) -> Arrays:
    """Reads Parquet files into memory, by the package pyarrow.

        return ctl.data.parquet("data/*.parquet", columns=["height", "label"])

    Args:
        files: paths or patterns of paths.
        columns: the same as for `ctl.data.csv`.

    Raises:
        UsageError: pyarrow is missing, or a file cannot be read.
    """
    pyarrow = _import_pyarrow("parquet")
    names = _names(columns)

    def read(file: Any) -> Any:
        metadata = pyarrow.parquet.read_metadata(file)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        parts = [group.column(i) for group in groups for i in range(metadata.num_columns)]
        chosen = [p for p in parts if not names or p.path_in_schema.partition(".")[0] in names]
        # A million equal values are a few bytes of a file.
        least = sum(part.num_values * _BYTES.get(part.physical_type, 1) for part in chosen)
        if least > (host.memory_limit() or least):
            raise pyarrow.ArrowInvalid(f"its {least} bytes do not fit into the memory")
        table = pyarrow.parquet.read_table(file, columns=names)
        missing = set(names or ()) - set(table.column_names)  # pyarrow ignores them
        if missing:
            raise pyarrow.ArrowInvalid(f"no column {min(missing)!r}")
        return table

    return _read_tables(find_files(files, "ctl.data.parquet"), read, pyarrow, columns)


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
    contents, paths = [], find_files(files, "ctl.data.text")
    for path in paths:
        with open_file(path) as file:
            contents.append(file.read())
    if length is None:
        lines = [line for content in contents for line in _split_lines(content)]
        if not lines:
            raise UsageError(f"{files} has no lines, but must have at least one.")
        return Arrays({"text": np.array(lines, object)}, files=paths)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UsageError(f"ctl.data.text got length={length!r}, but requires at least 1 byte.")
    content = b"".join(contents)
    if len(content) <= length:
        raise UsageError(
            f"{files} has {len(content)} bytes, but must have at least length + 1 = {length + 1}."
        )
    blocks = ByteBlocks(content, length)
    blocks.files = paths
    return blocks


class ByteBlocks(Source):
    """Blocks of consecutive bytes, and for each byte the one after it.

    Args:
        content: the text, which is copied into a tensor.
        length: bytes in a block.
    """

    version = "1"

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


def _import_pyarrow(module: str) -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"ctl.data.{module} requires the package pyarrow: pip install pyarrow."
        ) from None
    return pyarrow


def _names(columns: Columns | None) -> list[str] | None:
    names = columns.values() if isinstance(columns, Mapping) else columns
    return list(dict.fromkeys(names)) if names else None


def _read_tables(
    paths: Sequence[str], read: Callable[[Any], Any], pyarrow: Any, columns: Columns | None
) -> Arrays:
    tables = []
    for path in paths:
        try:
            with open_file(path) as file:
                tables.append(read(pyarrow.BufferReader(file.read())))
        except (pyarrow.ArrowException, KeyError) as error:
            problem = str(error).strip().strip("'\"").splitlines()[0]
            raise UsageError(f"{path} cannot be read: {problem}") from None
        names, first = tables[-1].schema.names, tables[0].schema.names
        if names != first:
            raise UsageError(f"{path} has the columns {names}, but the first file has {first}.")
        check_columns(names, path, named=isinstance(columns, Mapping))
    features = {}
    chosen = columns if isinstance(columns, Mapping) else {name: name for name in names}
    for feature, name in chosen.items():
        parts = [_arrow_column(table.column(name), name) for table in tables]
        features[feature] = np.concatenate(parts)
    return Arrays(features, files=paths)


def _arrow_column(column: Any, name: str) -> np.ndarray:
    """Returns a column as an array of numbers, of strings, or of lists of numbers of equal lengths."""
    if column.null_count:
        raise UsageError(
            f"The column {name!r} has {column.null_count} empty values: fill them, or choose other "
            "columns."
        )
    values = column.to_pylist() if "list" in str(column.type) else column.to_numpy()
    return make_column(values, name)
