"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from ctl.data.augmentation import augmented
from ctl.data.bucketing import bucketed
from ctl.data.cache import cached
from ctl.data.idx import idx
from ctl.data.image_folder import image_folder
from ctl.data.mixing import mixture
from ctl.data.packing import packed
from ctl.data.ragged import sequences
from ctl.data.records import records
from ctl.data.source import (
    Arrays,
    Augmented,
    GlobalBatches,
    PerReplica,
    RowSource,
    Source,
)
from ctl.data.tables import arrays, csv, generator, parquet
from ctl.data.text import text
from ctl.data.tfrecords import tfrecords

__all__ = [
    "Arrays",
    "Augmented",
    "GlobalBatches",
    "PerReplica",
    "RowSource",
    "Source",
    "arrays",
    "augmented",
    "bucketed",
    "cached",
    "csv",
    "generator",
    "idx",
    "image_folder",
    "mixture",
    "packed",
    "parquet",
    "records",
    "sequences",
    "text",
    "tfrecords",
]
