"""--mode=explain: prints the step that a config runs on this machine."""

from ctl import optimizers
from ctl.hardware import devices
from ctl.modes import DONE, Arguments, experiment
from ctl.modes.experiment import Experiment
from ctl.replica.engine import engine_of

_MAX_REPLICAS = 8  # replicas whose rows are listed
_COMPILED = {
    "off": "nothing by XLA",
    "loop": "several complete steps, one XLA program",
    "step": "the complete step, one XLA program",
    "gradients": "forward and backward pass by XLA; reduction and update outside",
    "autocluster": "the clusters that TensorFlow's auto-clustering finds",
}


def explain(arguments: Arguments) -> int:
    """Builds the experiment, prints its description, and writes nothing."""
    print(describe(experiment.build(arguments.config, arguments.config_path)))
    return DONE


def describe(experiment: Experiment) -> str:
    """Describes the step of an experiment: lines of a name and a text, then the complete config."""
    rows = [
        *_describe_hardware(experiment),
        *_describe_batch(experiment),
        *_describe_update(experiment),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", "config:", str(experiment.config).rstrip()])


def _describe_hardware(experiment: Experiment) -> list[tuple[str, str]]:
    hardware, plan = experiment.hardware, engine_of(experiment.trainer).plan
    return [
        ("strategy", f"{hardware.name} ({hardware.reason})"),
        ("devices", ", ".join(devices.replica_devices(hardware.strategy))),
        ("replicas", str(engine_of(experiment.trainer).plan.layout.replicas)),
        ("precision", experiment.config.runtime.precision),
        ("compiled", f"{_COMPILED[plan.xla]} ({plan.xla_reason})"),
    ]


def _describe_batch(experiment: Experiment) -> list[tuple[str, str]]:
    layout = engine_of(experiment.trainer).plan.layout
    per_replica = []
    for replica, count in enumerate(layout.row_counts()[:_MAX_REPLICAS]):
        first, padding = replica * layout.rows_per_replica, layout.rows_per_replica - count
        text = f"{first}..{first + count - 1}" if count else "none"
        per_replica.append(
            f"replica {replica}: {text}{f' and {padding} of padding, masked' * (padding > 0)}"
        )
    rows = "; ".join(per_replica) + "; ..." * (layout.replicas > _MAX_REPLICAS)
    micro_batches = experiment.trainer.options.gradient_accumulation_steps
    if micro_batches > 1:
        rows += f", in {micro_batches} micro-batches"
    if layout.even:
        denominator = f"{layout.global_batch_size}, a constant, unless the batch has weights"
    else:
        denominator = "the total weight of the rows that exist, first summed over the replicas"
    return [
        (
            "global batch",
            f"{layout.global_batch_size} examples, from step 0 or the last checkpoint in the workdir",
        ),
        ("rows", rows),
        ("denominator", denominator),
    ]


def _describe_update(experiment: Experiment) -> list[tuple[str, str]]:
    trainer, config = experiment.trainer, experiment.config
    variables = trainer.model.trainable_variables
    rate = optimizers.learning_rate(config.optimizer, trainer.global_batch_size)
    optimizer = f"{config.optimizer.name}, {config.optimizer.schedule} learning rate {rate:g}"
    return [
        ("reduction", _describe_reduction(experiment)),
        ("clip", str(trainer.options.clip)),
        ("optimizer", optimizer),
        (
            "variables",
            f"{len(variables)} trainable, {engine_of(trainer).parameter_count():,} parameters",
        ),
    ]


def _describe_reduction(experiment: Experiment) -> str:
    trainer, options = experiment.trainer, experiment.trainer.options
    if engine_of(trainer).plan.layout.replicas == 1:
        text = "none: one replica"
    else:
        variables = trainer.model.trainable_variables
        size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        size *= max(1, options.logical_shards)  # each shard's sum is sent by itself
        size /= 2 if options.all_reduce_dtype else 1  # a 16-bit dtype
        text = f"one SUM all-reduce, {size / 2**20:.2f} MiB"
    if options.all_reduce_dtype:
        text += f" in {options.all_reduce_dtype}"
    if options.logical_shards:
        text += f"; the gradient is the ordered sum over {options.logical_shards} logical shards"
    return text
