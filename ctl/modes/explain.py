"""--mode=explain: prints the step that a config runs on this machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from ctl.built import memory_estimate
from ctl.built.inner_loop import plan_of, step_of
from ctl.configs import group_values, overrides
from ctl.configs.error_location import describe as describe_error
from ctl.configs.options import TrainerOptions
from ctl.errors import align, list_some, print_line
from ctl.hardware import devices, strategies
from ctl.hardware.strategies import STRATEGIES
from ctl.keras import precision
from ctl.kernels import attention
from ctl.loop.actions import registry
from ctl.loop.actions.action import Action, check_action
from ctl.loop.checkpoints import warm_start
from ctl.loop.exports import ExportModel
from ctl.modes import DONE, Arguments, experiment, messages
from ctl.modes.experiment import Experiment
from ctl.optimizers.arguments import REPLACED
from ctl.rows import packs
from ctl.update.gradients import optimizers_of

# Arguments of every optimizer that are shown elsewhere or that ctl replaces.
_NOT_SHOWN = {"name", "learning_rate", "is_legacy_optimizer", *REPLACED}


def explain(arguments: Arguments) -> int:
    """Builds the experiment, prints its description, and writes nothing.

    It describes the steps after the last `frozen_until`, which train the most layers and need the most
    memory.
    """
    groups = group_values.without(arguments.config.optimizer.groups, "frozen_until")
    config = overrides.with_values(arguments.config, {"optimizer.groups": groups})
    built = experiment.build(config, arguments.config_path)
    actions = [
        *registry.make_actions(built.config, arguments.config_path, workdir=arguments.workdir),
        *built.trainer.build_actions(),
    ]
    checked = [check_action(action, built.evaluator) for action in actions]
    print_line(f"{_describe(built, checked)}\n\nconfig:\n{str(arguments.config).rstrip()}")
    return DONE


def _describe(experiment: Experiment, actions: Sequence[Action]) -> str:
    """Describes what the config does not state, by lines of a name and a text."""
    hardware, trainer = experiment.hardware, experiment.trainer
    plan, step = plan_of(trainer), step_of(trainer)
    layout, parameters = plan.layout, step.attributes.parameter_count()
    trained, parts = step.attributes.trained_variables(), trainer.options.micro_batches
    micro_batches = f", each in {parts} micro-batches" if parts > 1 else ""
    with attention.observe() as observed:
        memory = _describe_memory(experiment)
    rows = {
        "strategy": f"{hardware.name} ({hardware.reason}): {STRATEGIES[hardware.name].summary}",
        "devices": ", ".join(devices.replica_devices(hardware.strategy)),
        "replicas": layout.replicas,
        "xla": f"{plan.xla} ({plan.xla_reason})",
        **_describe_attention(experiment, observed()),
        "data": messages.entries(trainer),
        "global batch": f"{messages.shares(layout)} rows{micro_batches}",
        "denominator": f"{layout.global_batch_size}, a constant, unless the batch has weights"
        if layout.even
        else "the total weight of the rows that exist, first summed over the replicas",
        "reduction": _describe_reduction(experiment),
        "clip": _describe_clip(trainer.options),
        **step.describe(),  # may replace the reduction
        "optimizer": _describe_optimizer(trainer.optimizer, trainer.options.optimizer_groups),
        "schedule": _describe_learning_rate(experiment),
        "variables": f"{len(trained)} trainable, {parameters:,} parameters",
        **memory,
        "actions": "; ".join(map(_describe_action, actions)) or "none",
    }
    lines = align([(name, str(text)) for name, text in rows.items()])
    # Where the initial weights come from, if the config names a checkpoint.
    weights = warm_start.describe(trainer, experiment.config.init)
    lines += ["", "weights:", *(f"  {line}" for line in weights)] * bool(weights)
    return "\n".join(lines)


def _describe_clip(options: TrainerOptions) -> str:
    clips = {k.removeprefix("clip_"): v for k, v in vars(options).items() if k[:5] == "clip_" and v}
    texts = [f"by {k.replace('_', ' ')} {v:g}, after the reduction" for k, v in clips.items()]
    return "".join(texts) or "none"


def _describe_reduction(experiment: Experiment) -> str:
    trainer, options = experiment.trainer, experiment.trainer.options
    plan = plan_of(trainer)
    if plan.layout.replicas == 1:
        return "none: one replica"
    copies = max(1, options.logical_shards)  # each shard's sum is sent by itself
    width = 2 if options.all_reduce_dtype else 0  # a 16-bit dtype
    variables = step_of(trainer).attributes.trained_variables()
    size = sum(copies * v.shape.num_elements() * (width or v.dtype.size) for v in variables)
    text = f"SUM all-reduce, {_mib(size)} in {options.all_reduce_dtype or plan.dtype.name}"
    if strategies.bucket_bytes(experiment.hardware.strategy):
        return f"{text}, in packs during the backward pass"
    return f"{text}, in packs of {_mib(packs.BYTES)}" if size > packs.BYTES else f"one {text}"


def _describe_optimizer(optimizer: precision.Optimizer, groups: Sequence[Mapping[str, Any]]) -> str:
    """Describes the optimizers that are used: their classes and their arguments."""
    scale = " with a loss scale" if precision.has_loss_scale(optimizer) else ""
    texts = []
    for inner in optimizers_of(optimizer):
        values = {k: v for k, v in inner.get_config().items() if k not in _NOT_SHOWN}
        arguments = ", ".join(f"{k}={v}" for k, v in values.items() if v is not None)
        texts.append(f"{type(inner).__name__}({arguments})")
    own = [group for group in groups if group.get("optimizer") is not None]
    names = [",".join(group_values.patterns(group)) for group in own]
    others = [f"; {text} for {name}" for text, name in zip(texts[1:], names, strict=True)]
    return "".join([texts[0], *others, scale])


def _describe_learning_rate(experiment: Experiment) -> str:
    """Describes the schedule by the rates that the optimizer uses."""
    config, optimizer = experiment.config, experiment.trainer.optimizer
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    text = config.optimizer.schedule if experiment.optimizer.called else "set by build_optimizer"
    if not callable(rate):
        return f"{text}: {float(rate.numpy()):g}"
    last = config.train.steps
    steps = sorted({0, config.optimizer.warmup_steps, last // 4, last // 2, last * 3 // 4, last})
    shown = ", ".join(f"{float(rate(step)):.4g} at update {step}" for step in steps)
    return f"{text}: {shown}"


def _describe_attention(experiment: Experiment, obstacles: Mapping[str, str]) -> dict[str, str]:
    """Lists which attention layers the fused kernel computes, and why it does not compute the others."""
    plan = plan_of(experiment.trainer)
    is_compiled = plan.compiles_micro_batches and attention.capability() >= (8, 0)
    names: dict[str, list[str]] = {}
    for name, obstacle in obstacles.items():
        obstacle = obstacle or (attention.NOT_COMPILED if not is_compiled else "")
        text = f"formula ({obstacle})" if obstacle else "fused kernel of cuDNN"
        names.setdefault(text, []).append(name.partition("/")[2] or name)
    parts = [f"{text}: {list_some(layers)}" for text, layers in names.items()]
    return {"attention": "; ".join(parts)} if parts else {}


def _describe_memory(experiment: Experiment) -> dict[str, str]:
    """Describes the memory of a step on one replica, by part."""
    try:
        memory = memory_estimate.estimate(experiment.trainer)
    except Exception as error:  # the trainer's own code runs here for the first time
        return {"memory": f"not estimated: {describe_error(error)}"}
    least = "at least " * memory.incomplete
    rows = -(-plan_of(experiment.trainer).layout.rows_per_replica // memory.micro_batches)
    parts = {
        "weights": memory.weights,
        "slots": memory.slots,
        **memory.parts,
        "gradients": memory.gradients,
        "sums": memory.gradient_sum,
        f"activations of {rows} rows": memory.activations,
        "buffers of sums": memory.reduction,
        "input": memory.input,
        "prefetched by the host": memory.prefetched,
    }
    return {
        "memory": f"{least}{_mib(memory.peak)} on a replica at its peak, estimated",
        **{f"  {name}": _mib(size) for name, size in parts.items() if size},
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _describe_action(action: Action) -> str:
    value = getattr(action, "_function", action)  # of a callable that is not an `Action`
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(action, ExportModel):
        return f"{name} (at the end)"
    return f"{name} (each {'inner loop' if action.at == 'train' else 'evaluation'})"
