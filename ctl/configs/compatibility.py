"""Rules about which options of a trainer may be combined; checked before the first step.

docs/matrix.md lists them; docs/reference/generate.py writes it.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

from ctl.errors import UsageError
from ctl.hardware.strategies import STRATEGIES, StrategySpec


def _option(key: str, default: Any) -> Any:
    """Returns a field of `Choice` that a config key sets."""
    return dataclasses.field(default=default, metadata={"key": key})


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options and facts that the rules depend on, known so far or resolved for one trainer.

    Attributes:
        replicas: the number of replicas.
        precision: `runtime.precision`.
        loss_scale: `runtime.loss_scale`.
        xla: the resolved `runtime.xla`; "auto" before the model is built.
        placement: `data.placement`.
        sync_batch_norm: whether the model has synchronized batch normalization.
        micro_batches: `optimizer.micro_batches`.
        per_micro_batch: whether batch normalization was requested per micro-batch.
        shards: `runtime.logical_shards`; 0 if the option is off.
        reduce_dtype: `runtime.all_reduce.dtype`; "" reduces in the dtype of the gradients.
        bucket_mib: `runtime.all_reduce.bucket_mib`; 0 reduces one group of gradients.
        compression: `runtime.all_reduce.compression`; "" if gradients are not compressed.
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
    precision: str = _option("runtime.precision", "float32")
    loss_scale: float = _option("runtime.loss_scale", 0.0)
    xla: str = _option("runtime.xla", "off")
    placement: str = _option("data.placement", "stream")
    sync_batch_norm: bool = False
    micro_batches: int = _option("optimizer.micro_batches", 1)
    per_micro_batch: bool = False
    shards: int = _option("runtime.logical_shards", 0)
    reduce_dtype: str = _option("runtime.all_reduce.dtype", "")
    bucket_mib: float = _option("runtime.all_reduce.bucket_mib", 0.0)
    compression: str = _option("runtime.all_reduce.compression", "")
    batch: int = 8
    rows_per_replica: int | None = None
    full_batches: bool = True
    string_features: bool = False
    on_non_finite: str = _option("train.on_non_finite", "stop")
    loss_spike: float = _option("train.loss_spike", 0.0)
    shard_state: bool = _option("optimizer.shard_state", False)
    strategy: str = "mirrored"
    cpu_collectives: bool = False

    @property
    def spec(self) -> StrategySpec:
        """The facts of the strategy."""
        return STRATEGIES[self.strategy]

    @classmethod
    def of(cls, values: Mapping[str, Any], **facts: Any) -> "Choice":
        """Returns the choice that options and facts make.

        Args:
            values: full names of keys -> values, of a config or of the options of a trainer.
            **facts: further fields, which also replace an option by its resolved value. A fact that
                is not known yet has a default that breaks no rule.
        """
        fields = dataclasses.fields(cls)
        keys = {field.name: field.metadata["key"] for field in fields if "key" in field.metadata}
        options = {name: values[key] for name, key in keys.items() if key in values}
        return cls(**options | facts)


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


_SINGLE_REPLICA_XLA = ("loop", "step")


# These rules depend on nothing but the options, so they are checked before TensorFlow is imported.
OPTION_RULES = (
    Rule(
        lambda c: c.placement == "device" and c.xla != "loop",
        "data.placement=device requires runtime.xla=loop, which reads examples on the device",
        "set runtime.xla=loop, or data.placement=stream",
    ),
    Rule(
        lambda c: bool(c.loss_scale) and c.precision != "float16",
        "runtime.loss_scale has no effect without runtime.precision=float16",
        "set runtime.loss_scale=0",
    ),
    Rule(
        lambda c: bool(c.loss_spike) and c.on_non_finite == "ignore",
        "train.loss_spike has no effect with train.on_non_finite=ignore",
        "set train.loss_spike=0, or choose train.on_non_finite=stop, skip or rollback",
    ),
    Rule(
        lambda c: bool(c.compression) and bool(c.reduce_dtype),
        "runtime.all_reduce.compression and runtime.all_reduce.dtype both determine how gradients are "
        "sent",
        "set only one of the two",
    ),
    Rule(
        lambda c: bool(c.compression) and c.precision == "float64",
        "runtime.all_reduce.compression would undo runtime.precision=float64",
        "set only one of the two",
    ),
    Rule(
        lambda c: bool(c.compression) and bool(c.shards),
        "runtime.logical_shards keeps every bit of the gradients, and runtime.all_reduce.compression "
        "does not",
        "set only one of the two",
    ),
    Rule(
        lambda c: bool(c.compression) and bool(c.bucket_mib),
        "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and "
        "runtime.all_reduce.compression after it",
        "set only one of the two",
    ),
    Rule(
        lambda c: bool(c.bucket_mib) and c.xla not in ("auto", "off"),
        "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and a program of XLA "
        "returns all of its results at its end",
        "set runtime.xla=off, or runtime.all_reduce.bucket_mib=0",
    ),
)

RULES = (
    *OPTION_RULES,
    Rule(
        lambda c: c.precision == "float16" and not c.spec.replica_values,
        "runtime.precision=float16 requires a loss scale, which tf_keras does not support under "
        "central storage, parameter servers and TPUs",
        "choose runtime.precision=bfloat16",
    ),
    Rule(
        lambda c: c.precision == "float64" and c.spec.tpu,
        "runtime.precision=float64 is not supported by TPUs",
        "choose runtime.precision=float32 or bfloat16",
    ),
    Rule(
        lambda c: c.xla == "gradients" and c.spec.central,
        "runtime.xla=gradients compiles code that reads variables, which central storage and "
        "parameter servers keep on another device",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.xla in _SINGLE_REPLICA_XLA and c.spec.coordinated,
        "runtime.xla=loop and step compile the update, which parameter servers apply on another "
        "machine",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.xla in _SINGLE_REPLICA_XLA and c.string_features,
        "runtime.xla=loop and step compile the complete step, and XLA does not support strings",
        "remove the string features from the batch, or choose runtime.xla=off",
    ),
    Rule(
        lambda c: c.spec.coordinated and (c.sync_batch_norm or bool(c.shards)),
        "synchronized batch normalization and runtime.logical_shards combine the replicas of a "
        "step, but the workers of parameter servers compute their steps independently",
        "turn both off, or choose runtime.strategy=multi_worker_mirrored",
    ),
    Rule(
        lambda c: (
            c.spec.coordinated and (c.on_non_finite in ("skip", "rollback") or bool(c.loss_spike))
        ),
        "train.on_non_finite=skip and rollback and train.loss_spike are decisions of all replicas "
        "together, but the workers of parameter servers compute their steps independently",
        "choose train.on_non_finite=stop or ignore, and set train.loss_spike=0",
    ),
    Rule(
        lambda c: c.spec.tpu and c.on_non_finite == "skip",
        "train.on_non_finite=skip applies the update conditionally, which TensorFlow does not "
        "support on a TPU",
        "choose train.on_non_finite=rollback, stop or ignore",
    ),
    Rule(
        lambda c: c.shard_state and not c.spec.replica_values,
        "optimizer.shard_state splits the slot variables that each replica holds, which central "
        "storage and parameter servers hold once; on TPUs it was never run",
        "set optimizer.shard_state=false, or choose runtime.strategy=mirrored or "
        "multi_worker_mirrored",
    ),
    Rule(
        lambda c: bool(c.reduce_dtype) and c.spec.coordinated,
        "runtime.all_reduce.dtype is the dtype of a reduction, and parameter servers have none",
        'set runtime.all_reduce.dtype=""',
    ),
    Rule(
        lambda c: c.reduce_dtype == "bfloat16" and c.cpu_collectives,
        "runtime.all_reduce.dtype=bfloat16 is not supported by TensorFlow's all-reduce between "
        "processes on CPUs",
        'set runtime.all_reduce.dtype="", or train on GPUs',
    ),
    Rule(
        lambda c: bool(c.compression) and not c.spec.replica_values,
        "runtime.all_reduce.compression keeps errors on each replica, which central storage and "
        "parameter servers cannot; on TPUs it was never run",
        'set runtime.all_reduce.compression="", or choose runtime.strategy=mirrored or '
        "multi_worker_mirrored",
    ),
    Rule(
        lambda c: c.compression == "bfloat16" and c.cpu_collectives,
        "runtime.all_reduce.compression=bfloat16 is not supported by TensorFlow's all-reduce between "
        "processes on CPUs",
        "choose runtime.all_reduce.compression=float16, or train on GPUs",
    ),
    Rule(
        lambda c: c.xla in _SINGLE_REPLICA_XLA and c.replicas > 1,
        "runtime.xla=loop and step compile complete steps into one program, which several replicas "
        "cannot share",
        "choose runtime.xla=gradients, autocluster or off",
    ),
    Rule(
        lambda c: c.xla == "gradients" and c.sync_batch_norm and c.replicas > 1,
        "runtime.xla=gradients compiles the model, and synchronized batch normalization reduces "
        "over the replicas inside the model",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.rows_per_replica is not None and c.micro_batches > c.rows_per_replica,
        "optimizer.micro_batches is larger than the per-replica batch",
        "set optimizer.micro_batches to at most the per-replica batch size",
        ("micro_batches", "rows_per_replica"),
    ),
    Rule(
        lambda c: c.sync_batch_norm and c.micro_batches > 1 and not c.per_micro_batch,
        "optimizer.micro_batches splits a batch into micro-batches, and synchronized "
        "batch normalization would use the statistics of a micro-batch",
        "set optimizer.micro_batches=1, or accept them with model.sync_batch_norm=per_micro_batch",
    ),
    Rule(
        lambda c: bool(c.shards) and c.shards % c.replicas != 0,
        "runtime.logical_shards is not a multiple of the number of replicas",
        "choose a multiple, or set runtime.logical_shards=0",
        ("shards", "replicas"),
    ),
    Rule(
        lambda c: bool(c.shards) and c.batch % c.shards != 0,
        "the global batch size is not a multiple of runtime.logical_shards",
        "choose a multiple, or set runtime.logical_shards=0",
        ("batch", "shards"),
    ),
    Rule(
        lambda c: bool(c.shards) and not c.full_batches,
        "runtime.logical_shards requires full batches of one known size",
        "batch with drop_remainder=True, or return single examples and let ctl batch them",
    ),
    Rule(
        lambda c: bool(c.shards) and c.sync_batch_norm,
        "runtime.logical_shards sums gradients in a fixed order, and synchronized batch "
        "normalization sums inside the model",
        "set runtime.logical_shards=0, or use a model without synchronized batch normalization",
    ),
    Rule(
        lambda c: bool(c.shards) and c.micro_batches > 1,
        "runtime.logical_shards already computes the gradients shard by shard",
        "set optimizer.micro_batches=1",
    ),
    Rule(
        lambda c: bool(c.shards) and c.xla not in ("auto", "off"),
        "runtime.logical_shards requires the same computation for each shard, and XLA fuses "
        "operations across shards",
        "set runtime.xla=off",
    ),
    Rule(
        lambda c: bool(c.shards) and bool(c.reduce_dtype),
        "runtime.logical_shards keeps every bit of the gradients, and runtime.all_reduce.dtype "
        "rounds them",
        "set only one of the two",
    ),
    Rule(
        lambda c: bool(c.reduce_dtype) and c.precision == "float64",
        "runtime.all_reduce.dtype=bfloat16 would undo runtime.precision=float64",
        "set only one of the two",
    ),
)


def check(choice: Choice, rules: Iterable[Rule] = RULES) -> None:
    """Raises a UsageError of one line for the first rule that a choice breaks."""
    for rule in rules:
        if rule.broken(choice):
            raise UsageError(rule.message(choice))
