"""Sources of examples, their order, and the input pipeline that feeds a strategy.

Each name is imported when it is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.data.bucketing import bucketed
    from ctl.data.cache import cached
    from ctl.data.files.images import idx, image_folder
    from ctl.data.files.random_access import random_access
    from ctl.data.files.records import records
    from ctl.data.files.tables import arrays, csv, generator, parquet, text
    from ctl.data.input_pipeline import distribute
    from ctl.data.mixing import mixture
    from ctl.data.packing import packed
    from ctl.data.ragged import sequences
    from ctl.data.source import (
        Arrays,
        Augmented,
        GlobalBatches,
        PerReplica,
        RowSource,
        Source,
        augmented,
    )

_NAMES = {
    "bucketing": ("bucketed",),
    "cache": ("cached",),
    "files.images": ("idx", "image_folder"),
    "files.random_access": ("random_access",),
    "files.records": ("records",),
    "files.tables": ("arrays", "csv", "generator", "parquet", "text"),
    "input_pipeline": ("distribute",),
    "mixing": ("mixture",),
    "packing": ("packed",),
    "ragged": ("sequences",),
    "source": (
        "Arrays",
        "Augmented",
        "GlobalBatches",
        "PerReplica",
        "RowSource",
        "Source",
        "augmented",
    ),
}
_MODULES = {name: f"ctl.data.{module}" for module, names in _NAMES.items() for name in names}
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
]


# Former name -> what to do instead.
_REMOVED = {
    "tfrecords": "use ctl.data.records, or return a tf.data.TFRecordDataset from build_dataset"
}


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise AttributeError(f"ctl.data.{name} does not exist any more: {_REMOVED[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'ctl.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
