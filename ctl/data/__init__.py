"""Sources of examples, their order, and the input pipeline that feeds a strategy."""

from typing import TYPE_CHECKING

from ctl import lazy

if TYPE_CHECKING:
    from ctl.data.bucketing import bucketed as bucketed
    from ctl.data.cache import cached as cached
    from ctl.data.files.images import idx as idx
    from ctl.data.files.images import image_folder as image_folder
    from ctl.data.files.random_access import random_access as random_access
    from ctl.data.files.records import records as records
    from ctl.data.files.tables import csv as csv
    from ctl.data.files.tables import parquet as parquet
    from ctl.data.files.tables import text as text
    from ctl.data.input_pipeline import distribute as distribute
    from ctl.data.memory import arrays as arrays
    from ctl.data.memory import generator as generator
    from ctl.data.mixing import mixture as mixture
    from ctl.data.packing import packed as packed
    from ctl.data.ragged import sequences as sequences
    from ctl.data.source import Arrays as Arrays
    from ctl.data.source import Augmented as Augmented
    from ctl.data.source import GlobalBatches as GlobalBatches
    from ctl.data.source import PerReplica as PerReplica
    from ctl.data.source import RowSource as RowSource
    from ctl.data.source import Source as Source
    from ctl.data.source import augmented as augmented

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "bucketing": "bucketed",
        "cache": "cached",
        "files.images": "idx image_folder",
        "files.random_access": "random_access",
        "files.records": "records",
        "files.tables": "csv parquet text",
        "input_pipeline": "distribute",
        "memory": "arrays generator",
        "mixing": "mixture",
        "packing": "packed",
        "ragged": "sequences",
        "source": "Arrays Augmented GlobalBatches PerReplica RowSource Source augmented",
    },
)
