"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from ctl.data.augmentation import augmented
from ctl.data.idx import idx
from ctl.data.image_folder import image_folder
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
    "csv",
    "generator",
    "idx",
    "image_folder",
    "parquet",
    "records",
    "text",
    "tfrecords",
]
