"""The lines that a run begins and ends with. Loads no TensorFlow."""

from collections.abc import Mapping
from typing import Any

from ctl.errors import list_some
from ctl.loop.progress import numbers


def complete(step: int, evaluation: Mapping[str, Any], config: Any) -> str:
    """A run that has nothing left to do, and how to go on."""
    found = f", {numbers(evaluation)}" if evaluation else ""
    further = f"--config.train.steps={step * 2}"
    if config.optimizer.schedule == "cosine" and not config.optimizer.decay_steps:
        further += " --allow_config_change, which spreads the cosine anew"
    return (
        f"This run is complete: {step} steps{found}. To train on, make train.steps larger "
        f"({further}); to start anew, add --fresh."
    )


def start(hardware: Any, trainer: Any) -> str:
    """What is about to train, where, and why there."""
    layout = trainer.layout
    if hardware.name == "parameter_server":
        workers, servers = (len(hardware.cluster.addresses[role]) for role in ("worker", "ps"))
        return (
            f"{hardware.name} ({hardware.reason}): {_count(workers, 'worker')}, "
            f"{_count(servers, 'parameter server')}; batch {layout.global_batch_size}; "
            f"{trainer.options.precision}; {trainer.model.count_params():,} parameters. Updates are "
            "asynchronous: each worker's comes from a batch of its own and from weights that others "
            "may have changed since, so this run is not a function of the batches alone."
        )
    shares = "+".join(str(share) for share in layout.row_counts()[:8])
    more = "+..." if layout.replicas > 8 else ""
    return (
        f"{hardware.name} ({hardware.reason}): {_count(layout.replicas, 'replica')}; "
        f"global batch {layout.global_batch_size} = {shares}{more} rows; "
        f"{trainer.options.precision}; {trainer.model.count_params():,} parameters"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def partial(unmatched: Any) -> str:
    """What a partial restore left out of the trainer and of the checkpoint."""
    left, dropped = unmatched.left(), unmatched.dropped()
    parts = [("left at their initial values: ", left), ("not used of the checkpoint: ", dropped)]
    told = "; ".join(start + list_some(names) for start, names in parts if names)
    return f"Restored in part: {told}."


def warm(taken: Any) -> str:
    """Which weights a run begins with that are not its own."""
    cast = f", cast from {taken.cast}" if taken.cast else ""
    return (
        f"Weights of {len(taken.names)} of {_count(taken.of, 'variable')} from {taken.path}{cast}: "
        f"{list_some(taken.names)}."
    )


def stopped(step: int, workdir: Any) -> str:
    """A run that a signal ended."""
    return f"Stopped at step {step}, saved in {workdir}: run me again to go on."


def done(workdir: Any) -> str:
    """A run that has reached its last step."""
    return f"Done: {workdir}/result.json; tensorboard --logdir {workdir}/summaries"
