"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from ctl.data.caching.cache import cached
from ctl.data.files.images import idx, image_folder
from ctl.data.files.random_access import random_access
from ctl.data.files.records import records
from ctl.data.files.tables import arrays, csv, generator, parquet, text
from ctl.data.files.tfrecords import tfrecords
from ctl.data.input_pipeline import distribute
from ctl.data.mixing import mixture
from ctl.data.sequences.bucketing import bucketed
from ctl.data.sequences.packing import packed
from ctl.data.sequences.ragged import sequences
from ctl.data.source import (
    Arrays,
    Augmented,
    GlobalBatches,
    PerReplica,
    RowSource,
    Source,
    augmented,
)

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
    "distribute",
    "generator",
    "idx",
    "image_folder",
    "mixture",
    "packed",
    "parquet",
    "random_access",
    "records",
    "sequences",
    "text",
    "tfrecords",
]
