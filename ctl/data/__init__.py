"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from ctl.data.augmentation import augmented
from ctl.data.idx import idx
from ctl.data.records import records
from ctl.data.source import (
    Arrays,
    Augmented,
    GlobalBatches,
    PerReplica,
    RowSource,
    Source,
    arrays,
)
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
    "idx",
    "records",
    "tfrecords",
]
