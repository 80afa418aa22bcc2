"""A rule about which options may be combined, and the options and facts that it depends on."""

from collections.abc import Callable
import dataclasses


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options and facts that the rules depend on, resolved for one trainer.

    Attributes:
        replicas: the number of replicas.
        precision: `runtime.precision`.
        loss_scale: `runtime.loss_scale`.
        xla: the resolved `runtime.xla`; "auto" only before the hardware is known.
        placement: `data.placement`.
        sync_batch_norm: whether the model has synchronized batch normalization.
        micro_batches: `optimizer.gradient_accumulation_steps`.
        per_micro_batch: whether batch normalization was requested per micro-batch.
        shards: `runtime.logical_shards`; 0 if the option is off.
        reduce_dtype: `runtime.all_reduce.dtype`; "" reduces in the dtype of the gradients.
        bucket_mib: `runtime.all_reduce.bucket_mib`; 0 reduces one group of gradients.
        compression: `runtime.all_reduce.compression`; "" if gradients are not compressed.
        rank: `runtime.all_reduce.rank`.
        compression_start: `runtime.all_reduce.compression_start`.
        batch: the global batch size.
        rows_per_replica: the largest per-replica batch size; None if it is not known.
        full_batches: whether every global batch has exactly `batch` examples.
        string_features: whether the batches contain strings.
        on_non_finite: `train.on_non_finite`.
        loss_spike: `train.loss_spike`; 0 if the option is off.
        shard_state: `optimizer.shard_state`.
        strategy: the name of the strategy in `hardware.strategies`, such as "central_storage".
        cpu_collectives: whether gradients are reduced between processes by TensorFlow's collectives
            on CPUs.
    """

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
    rank: int = 0
    compression_start: int = 0
    batch: int = 8
    rows_per_replica: int | None = None
    full_batches: bool = True
    string_features: bool = False
    on_non_finite: str = "stop"
    loss_spike: float = 0.0
    shard_state: bool = False
    strategy: str = "mirrored"
    cpu_collectives: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """One combination of options that cannot compute the right update, or has no effect.

    Attributes:
        broken: returns whether a choice breaks the rule.
        reason: why the combination is rejected; options are named by their config keys.
        fix: what to change, as an imperative.
        values: the fields of `Choice` whose values the message quotes.
    """

    broken: Callable[[Choice], bool]
    reason: str
    fix: str
    values: tuple[str, ...] = ()

    def message(self, choice: Choice) -> str:
        """Returns one line for a choice that breaks the rule: the reason, and how to fix it."""
        starts_with_key = self.reason.partition(" ")[0].count(".")
        reason = self.reason if starts_with_key else self.reason[0].upper() + self.reason[1:]
        values = ", ".join(f"{name}={getattr(choice, name)}" for name in self.values)
        return f"{reason}{f' ({values})' if values else ''}: {self.fix}."
