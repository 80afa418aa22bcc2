"""Examples from record files, read in random order: TFRecord and ArrayRecord."""

from collections.abc import Callable, Mapping, Sequence
import copy
from typing import Any

import tensorflow as tf

from ctl.data import host_random, sampler
from ctl.data.autograph import convert
from ctl.data.elements import name_features
from ctl.data.files import record_index
from ctl.data.files.block_reader import BlockReader
from ctl.data.files.record_reader import ArrayRecordReader, RecordReader, is_array_record
from ctl.data.source import Batch, RowSource, Source
from ctl.errors import UsageError

_BLOCKS_AHEAD = 16  # of an evaluation
Parse = Callable[[tf.Tensor], Any]


def records(
    files: str | Sequence[str], parse: Parse | Mapping[str, Any],
    *, skip_damaged: bool = False, index_dir: str | None = None, version: str | None = None,
) -> Source:  # fmt: skip
    """Returns the examples in TFRecord or ArrayRecord files, which are read in random order.

        ctl.data.records("data/train-*.tfrecord", {
            "image": tf.io.FixedLenFeature([784], tf.float32),
            "label": tf.io.FixedLenFeature([], tf.int64)})

    Each epoch is a permutation of all examples; for files in an object store, a permutation of blocks of
    neighboring records, and then of the records of 128 blocks. A run resumes without reading the earlier
    examples, and each process reads only the rows of its own replicas. The first use of a TFRecord file
    writes an index of its records into `index_dir`.

    Args:
        files: paths or patterns of paths; the files of a pattern are sorted. TFRecord files may be URLs,
            such as gs://bucket/train-*, and must not be compressed.
        parse: the features for `tf.io.parse_example`, which parses many records at a time; or a
            function from one serialized record to a dict of tensors or (x, label), in TensorFlow ops.
        skip_damaged: replace a record whose checksum is wrong by the next one that is not damaged,
            and log it. Only TFRecord files.
        index_dir: the folder of the indexes, or its URL; None: `.ctl_index` beside local files, or the
            user's cache folder if that cannot be written, and for URLs.
        version: a name for what a function `parse` does, such as "1". `data.cache` in a folder requires
            it, and parses the records again if it has changed.

    Raises:
        UsageError: no file matches, or a file is empty, truncated, compressed or of another format.
    """
    paths = record_index.find_files(files, "ctl.data.records")
    kinds = {is_array_record(path) for path in paths}
    if len(kinds) > 1:
        raise UsageError(
            "ctl.data.records got TFRecord and ArrayRecord files: convert one kind by ctl convert."
        )
    reader: Any
    if kinds.pop():
        reader = ArrayRecordReader(paths, skip_damaged=skip_damaged)
    else:
        indexes = record_index.load(paths, index_dir)
        remote = [path for path in paths if not record_index.is_local(path)]
        if remote and len(remote) < len(paths):
            raise UsageError(f"ctl.data.records got local files and {remote[0]}: use one kind.")
        reader = (BlockReader if remote else RecordReader)(indexes, skip_damaged=skip_damaged)
    source: Source
    if callable(parse):
        source = Records(reader, parse)
    # Features of other kinds have a length that differs between examples.
    elif all(isinstance(feature, tf.io.FixedLenFeature) for feature in parse.values()):
        source = RecordFeatures(reader, parse)
    else:
        source = Records(reader, lambda record: tf.io.parse_single_example(record, dict(parse)))
    described = None if callable(parse) else repr(sorted(parse.items()))
    source.version = version or described
    return source


class _Serialized(Source):
    """Serialized records, each a string.

    Args:
        reader: reads records by their index.

    Attributes:
        skip_damaged: whether a damaged record is replaced by the next one.
    """

    def __init__(self, reader: Any):
        self.reader = reader
        self.row_bytes = reader.row_bytes
        self.files, self.record_offsets = reader.paths, reader.offsets
        self.skip_damaged = reader.skip_damaged
        self._by_python = True

    def __len__(self) -> int:
        """The number of records."""
        return len(self.reader)

    def without_python(self) -> Source:
        """Returns the same source, read by TensorFlow ops alone, for a remote host."""
        source = copy.copy(self)
        source._by_python = False
        return source

    def order(self, positions: tf.Tensor, *, seed: int, span: int) -> tf.Tensor:
        """Returns the records at positions of the training stream, and reads ahead of them."""
        if not isinstance(self.reader, BlockReader):
            return super().order(positions, seed=seed, span=span)
        ahead = self.reader.window // 2
        indexes = sampler.block_indexes(
            tf.concat([positions, positions + ahead], axis=0),
            count=len(self),
            seed=seed,
            span=span + ahead,
            rows=self.reader.rows,
            window=self.reader.window,
        )
        return self._read_ahead(indexes)[: tf.size(positions)]

    def evaluation_order(self, positions: tf.Tensor, *, batch_size: int) -> tf.Tensor:
        """Returns the positions, and reads ahead of them."""
        if not isinstance(self.reader, BlockReader):
            return positions
        after = tf.minimum(positions + _BLOCKS_AHEAD * self.reader.rows, len(self) - 1)
        return self._read_ahead(tf.concat([positions, after], axis=0))[: tf.size(positions)]

    def _read_ahead(self, indexes: tf.Tensor) -> tf.Tensor:
        if self._by_python:
            started = tf.numpy_function(self.reader.read_ahead, [indexes], tf.int64)
            with tf.control_dependencies([started]):
                return tf.identity(indexes)
        return indexes

    def _read(self, indexes: tf.Tensor) -> tf.Tensor:
        if not self._by_python:
            return self.reader.read_in_graph(indexes)
        read = self.reader.read_by_python
        serialized = tf.numpy_function(read, [indexes], tf.string, stateful=False)
        return tf.ensure_shape(serialized, indexes.shape)


class Records(_Serialized, RowSource):
    """Records that a function of the user parses one by one.

    Args:
        reader: reads the records.
        parse: makes an example of one record.
    """

    def __init__(self, reader: Any, parse: Parse):
        super().__init__(reader)
        self._parse = parse

    def read(self, indexes: tf.Tensor) -> tf.Tensor:
        """Reads serialized records."""
        return self._read(indexes)

    def parse(self, row: tf.Tensor) -> Batch:
        """Parses one serialized record."""
        with host_random.check(self._parse):
            return name_features(convert(self._parse)(row))


class RecordFeatures(_Serialized):
    """Serialized `tf.train.Example`s with features of fixed lengths.

    Args:
        reader: reads the records.
        features: describes an example.
    """

    def __init__(self, reader: Any, features: Mapping[str, tf.io.FixedLenFeature]):
        super().__init__(reader)
        self._features = dict(features)

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads records and parses them together."""
        return tf.io.parse_example(self._read(indexes), self._features)
