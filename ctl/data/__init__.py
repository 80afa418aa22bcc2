"""Sources of examples, their order, and the input pipeline that feeds a strategy.

Each name is imported when it is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

# Now, because a later import of the package of the same name would replace the function.
from ctl.data.sequences.ragged import sequences

if TYPE_CHECKING:
    from ctl.data.caching.cache import cached
    from ctl.data.files.images import idx, image_folder
    from ctl.data.files.random_access import random_access
    from ctl.data.files.records import records
    from ctl.data.files.tables import arrays, csv, generator, parquet, text
    from ctl.data.input_pipeline import distribute
    from ctl.data.mixing import mixture
    from ctl.data.sequences.bucketing import bucketed
    from ctl.data.sequences.packing import packed
    from ctl.data.source import (
        Arrays,
        Augmented,
        GlobalBatches,
        PerReplica,
        RowSource,
        Source,
        augmented,
    )

_MODULES = {
    "Arrays": "ctl.data.source",
    "Augmented": "ctl.data.source",
    "GlobalBatches": "ctl.data.source",
    "PerReplica": "ctl.data.source",
    "RowSource": "ctl.data.source",
    "Source": "ctl.data.source",
    "arrays": "ctl.data.files.tables",
    "augmented": "ctl.data.source",
    "bucketed": "ctl.data.sequences.bucketing",
    "cached": "ctl.data.caching.cache",
    "csv": "ctl.data.files.tables",
    "distribute": "ctl.data.input_pipeline",
    "generator": "ctl.data.files.tables",
    "idx": "ctl.data.files.images",
    "image_folder": "ctl.data.files.images",
    "mixture": "ctl.data.mixing",
    "packed": "ctl.data.sequences.packing",
    "parquet": "ctl.data.files.tables",
    "random_access": "ctl.data.files.random_access",
    "records": "ctl.data.files.records",
    "text": "ctl.data.files.tables",
}
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
