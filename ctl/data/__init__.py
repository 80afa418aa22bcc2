"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from ctl.data.augmentation import augmented
from ctl.data.idx import idx
from ctl.data.source import Arrays, Augmented, GlobalBatches, PerReplica, Source, arrays
from ctl.data.tfrecords import tfrecords

__all__ = [
    "Arrays",
    "Augmented",
    "GlobalBatches",
    "PerReplica",
    "Source",
    "arrays",
    "augmented",
    "idx",
    "tfrecords",
]
