"""Steps on more workers and faster networks than were measured, computed by the cost model."""

import dataclasses

from benchmarks.network.cost_model import CostModel, rounds, sent_bytes

# Fitted to the measurements in docs/scaling.md; latency in seconds per round.
FITTED = CostModel(overhead=1.117, latency=7e-05)
WORKERS = (8, 64)
GBITS = (1, 10, 100)


@dataclasses.dataclass(frozen=True)
class Job:
    """A model whose step is predicted.

    Attributes:
        name: the model and the per-replica batch.
        parameters: the number of its parameters; the gradients are float32.
        computing: the assumed seconds of computing per step of one worker.
    """

    name: str
    parameters: int
    computing: float


JOBS = (
    Job("MNIST CNN", 225_034, 0.001),
    Job("ResNet-50", 25_600_000, 0.044),
    Job("Transformer", 100_000_000, 0.050),
)


def table(cost_model: CostModel = FITTED) -> str:
    """Returns the predictions as a Markdown table."""
    rates = " | ".join(f"{gbits} Gbit/s" for gbits in GBITS)
    lines = [
        f"| computed | computing | workers | sent per step | rounds take | {rates} |",
        "|---|---:|---:|---:|---:|" + "---:|" * len(GBITS),
    ]
    for job in JOBS:
        lines += [_row(cost_model, job, workers) for workers in WORKERS]
    return "\n".join(lines)


def _row(cost_model: CostModel, job: Job, workers: int) -> str:
    gradient_bytes = 4 * job.parameters
    cells = [
        f"{job.name}, {job.parameters / 1e6:.3g} M",
        _seconds(job.computing),
        str(workers),
        f"{sent_bytes(workers, gradient_bytes) / 1e6:.1f} MB",
        _seconds(cost_model.latency * rounds(workers)),
    ]
    for gbits in GBITS:
        step = job.computing + cost_model.reducing(workers, gradient_bytes, 1000 * gbits)
        cells.append(f"{_seconds(step)} ({100 * job.computing / step:.0f} %)")
    return f"| {' | '.join(cells)} |"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
