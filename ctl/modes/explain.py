"""Says in words what step a config will run on this machine."""

from ctl import optimizers
from ctl.hardware import devices
from ctl.modes.experiment import Experiment


def describe(experiment: Experiment) -> str:
    """The step that this config runs here.

    Args:
        experiment: what `experiment.build` returned.

    Returns:
        Lines of a name and what it comes to, then the config's every key.
    """
    rows = [*_where(experiment), *_what(experiment), *_update(experiment)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", "config:", str(experiment.config).rstrip()])


def _where(experiment: Experiment) -> list[tuple[str, str]]:
    hardware, layout = experiment.hardware, experiment.trainer.layout
    names = ", ".join(devices.replica_devices(hardware.strategy))
    return [
        ("strategy", f"{hardware.name} ({hardware.reason})"),
        ("devices", names),
        ("replicas", str(layout.replicas)),
        ("precision", experiment.config.runtime.precision),
        ("compiled", _compiled(experiment)),
    ]


def _compiled(experiment: Experiment) -> str:
    parts = {
        "off": "nothing by XLA",
        "loop": "many whole steps, one XLA program",
        "step": "the whole step, one XLA program",
        "gradients": "forward and backward pass by XLA; reduction and update outside",
        "autocluster": "what TensorFlow's auto-clustering finds",
    }
    update = experiment.trainer.update
    return f"{parts[update.xla]} ({update.xla_why})"


def _what(experiment: Experiment) -> list[tuple[str, str]]:
    layout = experiment.trainer.layout
    accumulation = experiment.trainer.options.gradient_accumulation_steps
    rows = []
    for replica, share in enumerate(layout.row_counts()[:8]):
        first = replica * layout.rows_per_replica
        there = f"{first}..{first + share - 1}" if share else "none"
        padding = (
            f" and {layout.rows_per_replica - share} of padding, masked"
            if share < layout.rows_per_replica
            else ""
        )
        rows.append(f"replica {replica}: {there}{padding}")
    micro = f", in {accumulation} micro-batches" if accumulation > 1 else ""
    if layout.even:
        denominator = f"{layout.global_batch_size}, a constant, unless the batch brings weights"
    else:
        denominator = "the global weight of the rows that exist, summed over the replicas first"
    return [
        ("global batch", f"{layout.global_batch_size} examples, from step {_position(experiment)}"),
        ("rows", "; ".join(rows) + ("; ..." if layout.replicas > 8 else "") + micro),
        ("denominator", denominator),
    ]


def _position(experiment: Experiment) -> str:
    return "0 on, or where the run in the workdir stands"


def _update(experiment: Experiment) -> list[tuple[str, str]]:
    trainer, config = experiment.trainer, experiment.config
    variables = trainer.model.trainable_variables
    size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
    one = trainer.layout.replicas == 1
    options = trainer.options
    sent = size / 2**20 * max(1, options.logical_shards) / (2 if options.all_reduce_dtype else 1)
    reduction = "none: one replica" if one else f"one SUM all-reduce, {sent:.2f} MiB"
    if options.all_reduce_dtype:
        reduction += f" in {options.all_reduce_dtype}"
    if options.logical_shards:
        reduction += f"; the gradient is the sum in order of {options.logical_shards} shards'"
    rate = optimizers.learning_rate(config.optimizer, trainer.global_batch_size)
    return [
        ("reduction", reduction),
        ("clip", str(options.clip)),
        (
            "optimizer",
            f"{config.optimizer.name}, {config.optimizer.schedule} learning rate {rate:g}",
        ),
        ("variables", f"{len(variables)} trainable, {trainer.model.count_params():,} parameters"),
    ]
