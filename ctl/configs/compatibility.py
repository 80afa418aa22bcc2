"""What is allowed with what: one table, used to refuse, and printed into docs/matrix.md.

Loads no TensorFlow.
"""

from collections.abc import Callable, Iterator
import dataclasses
import itertools

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options that bear on each other.

    Attributes:
        replicas: how many compute a step.
        precision: `runtime.precision`.
        xla: what `runtime.xla` comes to, never "auto".
        sync_batch_norm: whether the model has synchronized batch normalization.
        micro_batches: `optimizer.gradient_accumulation_steps`.
        per_micro_batch: whether statistics of micro-batches were asked for.
        shards: `runtime.logical_shards`; 0 for none.
        reduce_dtype: `runtime.all_reduce.dtype`; "" for as they are.
        batch: the global batch.
        strategy: the strategy's row, such as "central_storage".
    """

    replicas: int = 1
    precision: str = "float32"
    xla: str = "off"
    sync_batch_norm: bool = False
    micro_batches: int = 1
    per_micro_batch: bool = False
    shards: int = 0
    reduce_dtype: str = ""
    batch: int = 8
    strategy: str = "mirrored"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One combination that cannot be right.

    Attributes:
        broken: whether a choice is of it.
        says: why, in one sentence without its full stop.
        instead: a choice that works.
    """

    broken: Callable[[Choice], bool]
    says: str
    instead: str


RULES = (
    Rule(
        lambda c: (
            c.precision == "float16"
            and c.strategy in ("central_storage", "parameter_server", "tpu")
        ),
        "runtime.precision=float16 needs a loss scale, which tf_keras does not have under central "
        "storage, parameter servers and TPUs",
        "choose runtime.precision=bfloat16",
    ),
    Rule(
        lambda c: c.precision == "float64" and c.strategy == "tpu",
        "runtime.precision=float64 is not what a TPU computes in",
        "choose runtime.precision=float32 or bfloat16",
    ),
    Rule(
        lambda c: c.xla == "gradients" and c.strategy in ("central_storage", "parameter_server"),
        "runtime.xla=gradients compiles what reads variables, which central storage and parameter "
        "servers keep on another device",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.xla in ("loop", "step") and c.strategy == "parameter_server",
        "runtime.xla=loop and step compile the update, and parameter servers apply it elsewhere",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.strategy == "parameter_server" and (c.sync_batch_norm or bool(c.shards)),
        "synchronized batch normalization and runtime.logical_shards join the replicas of a step, and "
        "workers of parameter servers step by themselves",
        "set both off, or choose runtime.strategy=multi_worker_mirrored",
    ),
    Rule(
        lambda c: bool(c.reduce_dtype) and c.strategy == "parameter_server",
        "runtime.all_reduce.dtype is of a reduction, and parameter servers have none",
        'set runtime.all_reduce.dtype=""',
    ),
    Rule(
        lambda c: c.xla in ("loop", "step") and c.replicas > 1,
        "runtime.xla=loop and step make whole steps one program, which replicas cannot share",
        "choose runtime.xla=gradients, autocluster or off",
    ),
    Rule(
        lambda c: c.xla == "gradients" and c.sync_batch_norm and c.replicas > 1,
        "runtime.xla=gradients compiles the model, and synchronized batch normalization reduces "
        "over the replicas inside of it",
        "choose runtime.xla=autocluster or off",
    ),
    Rule(
        lambda c: c.sync_batch_norm and c.micro_batches > 1 and not c.per_micro_batch,
        "with gradient_accumulation_steps, synchronized batch normalization has the statistics of "
        "a micro-batch",
        "set gradient_accumulation_steps=1, or ask for them by "
        "model.sync_batch_norm=per_micro_batch",
    ),
    Rule(
        lambda c: bool(c.shards) and c.shards % c.replicas != 0,
        "runtime.logical_shards is not a multiple of the number of replicas",
        "choose a multiple, or 0",
    ),
    Rule(
        lambda c: bool(c.shards) and c.batch % c.shards != 0,
        "the global batch is not a multiple of runtime.logical_shards",
        "choose a batch that is, or runtime.logical_shards=0",
    ),
    Rule(
        lambda c: bool(c.shards) and c.sync_batch_norm,
        "runtime.logical_shards sums gradients in a fixed order, and synchronized batch "
        "normalization sums inside the model",
        "set runtime.logical_shards=0, or take a model without it",
    ),
    Rule(
        lambda c: bool(c.shards) and c.micro_batches > 1,
        "runtime.logical_shards computes shard by shard already",
        "set gradient_accumulation_steps=1",
    ),
    Rule(
        lambda c: bool(c.shards) and c.xla != "off",
        "runtime.logical_shards needs each shard computed alike, and XLA fuses across shards",
        "set runtime.xla=off",
    ),
    Rule(
        lambda c: bool(c.shards) and bool(c.reduce_dtype),
        "runtime.logical_shards keeps every bit, and runtime.all_reduce.dtype drops some",
        "set one of the two",
    ),
    Rule(
        lambda c: bool(c.reduce_dtype) and c.precision == "float64",
        "runtime.all_reduce.dtype=bfloat16 would undo runtime.precision=float64",
        "set one of the two",
    ),
)


def check(choice: Choice) -> None:
    """Refuses a combination that cannot be right.

    Raises:
        UsageError: says why, and what to choose instead.
    """
    for rule in RULES:
        if rule.broken(choice):
            key = rule.says.startswith("runtime.")
            says = rule.says if key else f"{rule.says[0].upper()}{rule.says[1:]}"
            raise UsageError(f"{says}: {rule.instead}.")


AXES = {
    "replicas": (1, 2, 4),
    "precision": ("float64", "float32", "bfloat16", "float16"),
    "xla": ("off", "loop", "step", "gradients", "autocluster"),
    "sync_batch_norm": (False, True),
    "micro_batches": (1, 2),
    "shards": (0, 4),
    "reduce_dtype": ("", "bfloat16"),
}


def all_choices() -> Iterator[Choice]:
    """Every combination of the options' values."""
    for values in itertools.product(*AXES.values()):
        yield Choice(**dict(zip(AXES, values, strict=True)))  # type: ignore[arg-type]


def matrix() -> str:
    """docs/matrix.md."""
    total = list(all_choices())
    refused = [c for c in total if any(rule.broken(c) for rule in RULES)]
    lines = [
        "# What works with what",
        "",
        "Printed by `python -m ctl.configs.compatibility`; a test fails when it is stale. Every",
        "combination of",
        "",
        *(
            f"- {name}: {', '.join(str(v) or 'none' for v in values)}"
            for name, values in AXES.items()
        ),
        "",
        f"is allowed but for {len(refused)} of {len(total)}, refused before the first step. Tests show",
        "the update of each allowed one (`tests/combinations_test.py`: every pair of values by default,",
        "all of them with `-m slow`). By size or strategy there are more, below.",
        "",
        "| refused, because | instead | combinations |",
        "|---|---|---:|",
    ]
    for rule in RULES:
        count = sum(rule.broken(c) for c in total)
        lines.append(f"| {rule.says} | {rule.instead} | {count or 'by size or strategy'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(matrix(), end="")
