"""The combinations of options that combinations_test.py runs, and docs/matrix.md counts."""

import itertools

from ctl.configs.compatibility import Choice
from ctl.configs.keys import PRECISIONS, XLA_MODES

AXES = {
    "replicas": (1, 2, 4),
    "precision": PRECISIONS,
    "xla": tuple(mode for mode in XLA_MODES if mode != "auto"),
    "sync_batch_norm": (False, True),
    "micro_batches": (1, 2),
    "shards": (0, 4),
    "reduce_dtype": ("", "bfloat16"),
}


def all_choices():
    """Every combination of the values in `AXES`."""
    return [
        Choice(**dict(zip(AXES, each, strict=True))) for each in itertools.product(*AXES.values())
    ]
