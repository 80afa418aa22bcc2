"""Formats the lines that a run prints when it starts and ends."""

from collections.abc import Mapping, Sequence
import types
from typing import Any

from ctl.built.inner_loop import pipeline_of, plan_of, step_of
from ctl.data.features import RESERVED, flatten_features
from ctl.data.layout import Layout
from ctl.errors import count, list_some
from ctl.hardware import strategies
from ctl.hardware.selection import Hardware
from ctl.loop.checkpoints.matching import Comparison
from ctl.loop.progress import format_numbers
from ctl.optimizers import schedules
from ctl.trainer import StandardTrainer
from ctl.update import preprocessing


def complete(step: int, result: Mapping[str, Any], config: Any, changes: Sequence[str] = ()) -> str:
    """Describes a run that is complete, and how to train longer.

    Args:
        step: its last step.
        result: the content of its result.json.
        config: its config.
        changes: one line for each change of the config, "key: old -> new".
    """
    evaluation, stopped = result.get("eval") or {}, result.get("stopped")
    changed = "; ".join(changes)
    again = f"To train again with {changed}, name another --workdir. " * bool(changed)
    if stopped:
        return (
            f"This run is complete: it ended at step {step}, because {stopped['reason']}. {again}To "
            "train longer, change what ended it, such as train.best.patience or "
            "train.max_duration; to start from scratch, add --fresh."
        )
    numbers = f", {format_numbers(evaluation)}" if evaluation else ""
    flags = f"--config.train.steps={step * 2}"
    name = config.optimizer.schedule
    if schedules.ends_at_last_step(name, config.optimizer.decay_steps):
        flags += f" --allow_config_change, which stretches the {name} schedule"
    return (
        f"This run is complete: {step} steps{numbers}. {again}To train longer, increase "
        f"train.steps ({flags}); to start from scratch, add --fresh."
    )


def start(hardware: Hardware, trainer: StandardTrainer) -> str:
    """Describes what is going to train, on which hardware, and why."""
    plan = plan_of(trainer)
    layout = plan.layout
    parameters = step_of(trainer).attributes.parameter_count()
    what = f"{trainer.options.precision}; {parameters:,} parameters"
    examples = pipeline_of(trainer).examples_per_epoch()
    if examples and examples < layout.global_batch_size:
        what += f"; the data has {examples} examples, so a batch has some of them more than once"
    names = _names_in_code(type(trainer))  # super().train_step calls minimize, too
    # A replica_step is known once it is traced (checks/split_updates.py).
    applies = "apply_gradients" in names and not names & {"minimize", "train_step"}
    if plan.own_train_step and applies:
        what += "; the step calls apply_gradients itself, and only `ctl check` tests that update"
    if strategies.STRATEGIES[hardware.name].coordinated and hardware.cluster:
        workers, servers = (len(hardware.cluster.addresses[role]) for role in ("worker", "ps"))
        return (
            f"{hardware.name} ({hardware.reason}): {count(workers, 'worker')}, "
            f"{count(servers, 'parameter server')}; batch {layout.global_batch_size}; {what}. "
            "Updates are asynchronous: each worker computes its gradients from its own batch and "
            "from weights that others may have changed since, so the result depends on timing."
        )
    return (
        f"{hardware.name} ({hardware.reason}): {count(layout.replicas, 'replica')}; "
        f"global batch {shares(layout)} rows; {what}"
    )


def shares(layout: Layout) -> str:
    """Describes how the rows of the global batch are split over the replicas, such as "7 = 4+3"."""
    counts = "+".join(str(count) for count in layout.row_counts()[:8])
    return f"{layout.global_batch_size} = {counts}" + "+..." * (layout.replicas > 8)


def entries(trainer: StandardTrainer) -> str:
    """Lists which entries of the data are features, the label, and the weight of the losses."""
    groups: dict[str, list[str]] = {"features": [], **{kind: [] for kind in RESERVED}}
    for name in flatten_features(pipeline_of(trainer).element_spec()):
        kind = name.split("/")[0]
        groups[kind if kind in RESERVED else "features"].append(name)
    if type(trainer).sample_weight is not StandardTrainer.sample_weight:
        groups["weight"] = ["what sample_weight returns"]
    return "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in groups.items())


def images(trainer: StandardTrainer) -> list[str]:
    """Names the images that the default `preprocess` scales; warns of a layer that scales them, too."""
    if type(trainer).preprocess is not StandardTrainer.preprocess:
        return []
    scaled = ", ".join(preprocessing.uint8_images(pipeline_of(trainer).element_spec()))
    layer = preprocessing.find_second_scaling(step_of(trainer).attributes.layers())
    warning = (
        f"The layer {layer!r} seems to expect images of 0 to 255, but preprocess has scaled them to "
        "[0, 1]: remove the layer, or let preprocess return the batch as it is."
    )
    return [f"{scaled}: uint8, scaled to [0, 1]", *[warning] * bool(layer)] if scaled else []


def _names_in_code(cls: type) -> set[str]:
    """Returns the names in the code of the methods that a user gave a trainer."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith(("ctl.", "orbit."))]
    codes = [getattr(value, "__code__", None) for base in own for value in vars(base).values()]
    names: set[str] = set()
    for code in codes:
        if code is not None:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            names |= {*code.co_names}
    return names


def restored_in_part(comparison: Comparison) -> str:
    """Lists the variables of the trainer and the checkpoint that a partial restore ignored.

    Args:
        comparison: has the variables of both.
    """
    parts = [
        ("left at their initial values: ", comparison.left()),
        ("not used of the checkpoint: ", comparison.dropped()),
    ]
    reasons = "; ".join(start + list_some(names) for start, names in parts if names)
    return f"Restored in part: {reasons}."


def stopped(step: int, workdir: str) -> str:
    """Describes a run that was saved and stopped on request."""
    return f"Stopped at step {step}, saved in {workdir}: rerun the same command to resume."


def done(workdir: str, writers: Sequence[str]) -> str:
    """Describes a run that has reached its last step."""
    command = f"; tensorboard --logdir {workdir}/summaries" if "tensorboard" in writers else ""
    return f"Done: {workdir}/result.json{command}"
