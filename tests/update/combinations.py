"""The combinations of options that combinations_test.py runs, and docs/reference/config.md counts."""

import dataclasses
import itertools

from ctl.configs import keys
from ctl.configs.component import Rule
from ctl.parts.config import RULES as OF_PARTS
from ctl.update.config import PRECISIONS, RULES, XLA_MODES


@dataclasses.dataclass(frozen=True)
class Choice:
    """Values of the keys and facts that the rules of the step and of its parts read."""

    replicas: int = 1
    precision: str = "float32"
    loss_scale: float = 0.0
    xla: str = "off"
    placement: str = "stream"
    sync_batch_norm: bool = False
    micro_batches: int = 1
    per_micro_batch: bool = False
    shards: int = 0
    reduce_dtype: str = ""
    bucket_mib: float = 0.0
    compression: str = ""
    batch: int = 8
    rows_per_replica: int | None = None
    full_batches: bool = True
    string_features: bool = False
    on_non_finite: str = "stop"
    loss_spike: float = 0.0
    shard_state: bool | str = False
    histogram_interval: int = 0
    strategy: str = "mirrored"
    cpu_collectives: bool = False
    compiles_collectives: bool = False
    own_parts: bool = False
    ema_decay: float = 0.0
    shard_mib: float = 0.0

    def values(self):
        """The values by the names that rules read."""
        return {_NAMES.get(name, name): v for name, v in dataclasses.asdict(self).items()}

    def broken(self):
        """The rules that these values break."""
        values = self.values()
        return [rule for rule in NAMED_RULES if rule.broken(values)]

    def check(self):
        """Raises UsageError if the values break a rule."""
        keys.check_rules(self.values())


_NAMES = {
    "precision": "runtime.precision",
    "loss_scale": "runtime.loss_scale",
    "xla": "runtime.xla",
    "placement": "data.placement",
    "micro_batches": "optimizer.micro_batches",
    "shards": "runtime.logical_shards",
    "reduce_dtype": "runtime.all_reduce.dtype",
    "bucket_mib": "runtime.all_reduce.bucket_mib",
    "compression": "runtime.all_reduce.compression",
    "on_non_finite": "train.on_non_finite",
    "loss_spike": "train.loss_spike",
    "shard_state": "optimizer.shard_state",
    "histogram_interval": "summaries.histogram_interval",
    "ema_decay": "optimizer.ema_decay",
    "shard_mib": "runtime.cluster.shard_mib",
}
NAMED_RULES = [r for r in (*RULES, *OF_PARTS) if isinstance(r, Rule)]
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
