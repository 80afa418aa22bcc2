"""--mode=explain: prints the step that a config runs on this machine."""

from collections.abc import Sequence
from typing import Any

from ctl import optimizers
from ctl.configs.error_location import describe as describe_error
from ctl.configs.parameter_groups import patterns
from ctl.hardware import devices, gradient_groups
from ctl.loop.actions import registry
from ctl.loop.actions.action import Action, check_action
from ctl.loop.actions.export_model import ExportModel
from ctl.modes import DONE, Arguments, experiment
from ctl.modes.experiment import Experiment
from ctl.optimizers import schedules
from ctl.replica.arithmetic import precision
from ctl.replica.step import memory_estimate
from ctl.replica.step.engine import engine_of

_MAX_REPLICAS = 8  # replicas whose rows are listed
# Arguments of every optimizer that are shown elsewhere or that ctl replaces.
_NOT_SHOWN = {
    "name", "learning_rate", "jit_compile", "is_legacy_optimizer", "clipnorm", "clipvalue",
    "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency",
}  # fmt: skip
_COMPILED = {
    "off": "nothing by XLA",
    "loop": "several complete steps, one XLA program",
    "step": "the complete step, one XLA program",
    "gradients": "forward and backward pass by XLA; reduction and update outside",
    "autocluster": "the clusters that TensorFlow's auto-clustering finds",
}
_RANDOM = {
    False: "keyed by seed, step and row; others are rejected",
    True: "others than those keyed by seed, step and row are accepted (runtime.allow_unkeyed_random): "
    "the update may depend on the split",
}
_COUPLING = {
    False: "a loss that depends on other rows of the same replica or micro-batch is rejected",
    True: "losses may depend on other rows of the same replica or micro-batch "
    "(runtime.allow_row_coupling): the update may depend on the split",
}


def explain(arguments: Arguments) -> int:
    """Builds the experiment, prints its description, and writes nothing."""
    built = experiment.build(arguments.config, arguments.config_path)
    actions = [
        *registry.make_actions(built.config, arguments.config_path, workdir=arguments.workdir),
        *built.trainer.build_actions(),
    ]
    checked = [check_action(action, built.evaluator) for action in actions]
    print(describe(built, checked))
    return DONE


def describe(experiment: Experiment, actions: Sequence[Action] = ()) -> str:
    """Describes the step of an experiment: lines of a name and a text, then the complete config.

    Args:
        experiment: the experiment.
        actions: the actions of its run, in order.
    """
    rows = [
        *_describe_hardware(experiment),
        *_describe_batch(experiment),
        *_describe_update(experiment),
        *_describe_memory(experiment),
        ("evaluation", _describe_evaluation(experiment)),
        ("actions", "; ".join(map(_describe_action, actions)) or "none"),
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
    trainer = experiment.trainer
    parameters = engine_of(trainer).step.attributes.parameter_count()
    phases = engine_of(trainer).step.attributes.unfreezing.describe_phases

    def describe_variables() -> str:
        return f"{len(trainer.model.trainable_variables)} trainable, {parameters:,} parameters"

    return [
        ("reduction", phases(lambda: _describe_reduction(experiment))),
        ("clip", str(trainer.options.clip)),
        ("random numbers", _RANDOM[trainer.options.allow_unkeyed_random]),
        ("row coupling", _COUPLING[trainer.options.allow_row_coupling]),
        ("optimizer", _describe_optimizer(trainer.optimizer)),
        *_describe_slots(trainer),
        ("schedule", _describe_learning_rate(experiment)),
        *_describe_groups(experiment),
        *_describe_average(trainer.options.ema_decay),
        ("variables", phases(describe_variables)),
    ]


def _describe_optimizer(optimizer: Any) -> str:
    """Describes the optimizer that is used: its class and its arguments."""
    scale = " with a loss scale" if precision.has_loss_scale(optimizer) else ""
    inner = optimizer.inner_optimizer if scale else optimizer
    values = {k: v for k, v in inner.get_config().items() if k not in _NOT_SHOWN and v is not None}
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{type(inner).__name__}({arguments}){scale}"


def _describe_slots(trainer: Any) -> list[tuple[str, str]]:
    """Describes how the slot variables are split, if the options require it."""
    if not trainer.options.shard_state:
        return []
    replicas = trainer.strategy.num_replicas_in_sync
    if replicas == 1:
        return [("shard_state", "no slot variables are split: one replica")]
    text = "each updates its slice of the weights, and all-gathers send them to the others"
    return [("shard_state", f"slot variables split over {replicas} replicas; {text}")]


def _describe_learning_rate(experiment: Experiment) -> str:
    """Describes the schedule of the config, with values of the optimizer that is used."""
    config, optimizer = experiment.config, experiment.trainer.optimizer
    if precision.has_loss_scale(optimizer):
        optimizer = optimizer.inner_optimizer
    text = "set by build_optimizer"
    if experiment.optimizer.called:
        peak = optimizers.learning_rate(config.optimizer, config.data.global_batch_size)
        text = schedules.describe(config.optimizer, peak, config.train.steps)
    rate = optimizer._learning_rate
    if not callable(rate):
        return f"{text}: {float(rate.numpy()):g}"
    last = config.train.steps
    steps = sorted({0, config.optimizer.warmup_steps, last // 4, last // 2, last * 3 // 4, last})
    shown = ", ".join(f"{float(rate(step)):.4g} at update {step}" for step in steps)
    return f"{text}: {shown}"


def _describe_groups(experiment: Experiment) -> list[tuple[str, str]]:
    options = experiment.trainer.options
    texts = []
    for group in options.optimizer_groups:
        scale = group.get("learning_rate_scale")
        until = group.get("frozen_until")
        parts = [f"learning rate times {scale:g}"] if scale else []
        if until:
            parts.append(f"frozen until {until if isinstance(until, str) else f'step {until}'}")
        text = ", ".join(parts) or "frozen"
        texts.append(f"{', '.join(patterns(group))}: {text}")
    rows = [("groups", "; ".join(texts))] if texts else []
    if options.weight_decay_exclude:
        rows.append(("no decay", ", ".join(options.weight_decay_exclude)))
    return rows


def _describe_average(decay: float) -> list[tuple[str, str]]:
    if not decay:
        return []
    text = (
        f"of all weights with decay min({decay:g}, (1 + t) / (10 + t)), for evaluation and export"
    )
    return [("average", text)]


def _describe_memory(experiment: Experiment) -> list[tuple[str, str]]:
    """Describes the memory of a step on one replica, by part."""
    unfreezing = engine_of(experiment.trainer).step.attributes.unfreezing
    # The steps that train the most layers need the most memory.
    last = max(unfreezing.steps(), default=0)
    unfreezing.apply(last)
    phase = f" from step {last} on" * (last > 0)
    try:
        memory = memory_estimate.estimate(experiment.trainer)
    except Exception as error:  # the trainer's own code runs here for the first time
        return [("memory", f"not estimated: {describe_error(error)}")]
    finally:
        unfreezing.apply(0)
    parts, rows = memory.micro_batches, engine_of(experiment.trainer).plan.layout.rows_per_replica
    of = f"of {rows} rows" if parts == 1 else f"of a micro-batch of {-(-rows // parts)} rows"
    least = "at least " * memory.incomplete
    prefetched = f"; {_mib(memory.prefetched)} prefetched in the memory of the host"
    return [
        ("memory", f"{least}{_mib(memory.peak)} on a replica at its peak{phase}, estimated"),
        ("  weights", _mib(memory.weights)),
        ("  slots", f"{_mib(memory.slots)} of the optimizer"),
        *([("  averages", f"{_mib(memory.averages)} of the weights")] if memory.averages else []),
        *(
            [("  errors", f"{_mib(memory.compression)} of compressed gradients, with factors")]
            if memory.compression
            else []
        ),
        ("  gradients", _mib(memory.gradients)),
        *([("  sums", f"{_mib(memory.gradient_sum)} of gradients")] if parts > 1 else []),
        ("  activations", f"{least}{_mib(memory.activations)} {of}"),
        ("  input", f"{_mib(memory.input)}{prefetched}"),
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _describe_evaluation(experiment: Experiment) -> str:
    config, evaluator = experiment.config.eval, experiment.evaluator
    if evaluator is None:
        return "none: eval.splits is empty"
    times = [f"every {config.interval} steps"] if config.interval else []
    times += [f"every {config.seconds:g} seconds"] if config.seconds else []
    times = ["before training"] * config.before_training + times + ["at the end"]
    return f"of {', '.join(evaluator.splits)}, {', '.join(times)}"


def _describe_action(action: Action) -> str:
    value = getattr(action, "_function", action)  # of a callable that is not an `Action`
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(action, ExportModel):
        return f"{name} (at the end)"
    return f"{name} (each {'inner loop' if action.at == 'train' else 'evaluation'})"


def _describe_reduction(experiment: Experiment) -> str:
    trainer, options = experiment.trainer, experiment.trainer.options
    compression = engine_of(trainer).step.update.compression
    replicas = engine_of(trainer).plan.layout.replicas
    if replicas == 1:
        text = "none: one replica"
        if compression:
            text += f"; its gradients are compressed as those of several ({compression.name})"
    elif compression:
        count = "two SUM all-reduces" if options.compression == "powersgd" else "one SUM all-reduce"
        models = engine_of(trainer).step.attributes.models()
        text = f"{count}, compressed by {compression.describe(models)}"
    else:
        variables = trainer.model.trainable_variables
        copies = max(1, options.logical_shards)  # each shard's sum is sent by itself
        width = 2 if options.all_reduce_dtype else 0  # a 16-bit dtype
        sizes = [copies * v.shape.num_elements() * (width or v.dtype.size) for v in variables]
        text = f"one SUM all-reduce, {sum(sizes) / 2**20:.2f} MiB"
        bucket = gradient_groups.bucket_bytes(experiment.hardware.strategy)
        if bucket:
            # The loss is sent with the gradients, unless it has another dtype.
            loss = [] if width else [copies * engine_of(trainer).plan.dtype.size]
            groups = len(gradient_groups.group_sizes([*sizes, *loss], bucket))
            text = (
                f"reduces {groups} group{'s' * (groups != 1)} of gradients during the backward pass, "
                f"{sum(sizes) / 2**20:.2f} MiB"
            )
            # A ring adds the numbers in an order that depends on the position in the group.
            if engine_of(trainer).plan.layout.replicas > 2 and not options.logical_shards:
                text += ", equal to one group within rounding"
    if options.all_reduce_dtype:
        text += f" in {options.all_reduce_dtype}"
    if options.logical_shards:
        text += f"; the gradient is the ordered sum over {options.logical_shards} logical shards"
    return text
