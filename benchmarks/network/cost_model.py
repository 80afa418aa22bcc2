"""A model of the time of a step: computing, and a ring all-reduce over links of one rate.

Between processes on CPUs, TensorFlow 2.20 reduces dense gradients by a ring for every value of
`CommunicationImplementation`: AUTO and NCCL select NCCL only on GPUs. ctl reduces the gradients of a
step as one concatenated tensor, or as several of about 32 MiB. It is divided into one chunk per worker.
In each of 2 (N - 1) rounds, every worker sends one chunk to the next worker of the ring, so that it
sends 2 (N - 1) / N of the gradients' bytes per step (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations").

    reducing = overhead x sent bytes / bandwidth + latency x rounds

The model contains no time for computing, which depends on the hardware, and assumes that computing and
reducing do not overlap.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measured step.

    Attributes:
        model: the name of the model.
        gradient_bytes: the bytes of the gradients of one replica.
        workers: the number of workers.
        mbits: the rate of each link in each direction, in Mbit/s; None for no limit.
        computing: seconds per step without the all-reduce, while all workers compute.
        step: seconds per step.
        sent: the bytes that each worker sent per step, with all headers and acknowledgments.
    """

    model: str
    gradient_bytes: int
    workers: int
    mbits: float | None
    computing: float
    step: float
    sent: float

    @property
    def reducing(self) -> float:
        """Seconds per step that the all-reduce adds."""
        return self.step - self.computing


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The two parameters of the model.

    Attributes:
        overhead: how much longer a link is occupied than the bytes of the gradients alone require: by
            headers, acknowledgments, and pauses in the transfer.
        latency: additional seconds per round, which do not depend on the size of the chunk.
    """

    overhead: float
    latency: float

    def reducing(self, workers: int, gradient_bytes: float, mbits: float) -> float:
        """Returns the predicted seconds of the all-reduce of one step; `mbits` is the rate of a link."""
        transfer = _transfer_seconds(workers, gradient_bytes, mbits)
        return self.overhead * transfer + self.latency * rounds(workers)

    def step(self, measurement: Measurement) -> float:
        """Returns the predicted seconds of a step: measured computing plus predicted reducing."""
        return measurement.computing + self.reducing(
            measurement.workers, measurement.gradient_bytes, measurement.mbits
        )


def rounds(workers: int) -> int:
    """Returns the number of rounds of an all-reduce; in each, every worker sends one chunk."""
    return 2 * (workers - 1)


def sent_bytes(workers: int, gradient_bytes: float) -> float:
    """Returns the bytes of gradients that each worker sends, and receives, per all-reduce."""
    return rounds(workers) * gradient_bytes / workers


def fit(points: Sequence[Measurement]) -> CostModel:
    """Returns the model whose predictions equal two measurements.

    Args:
        points: two measurements. They should differ in bytes / rate / rounds, the seconds that a chunk
            occupies a link: a short one determines the latency, and a long one the overhead.

    Raises:
        ValueError: the measurements do not determine both parameters.
    """
    # overhead x seconds of transfer + latency x rounds = reducing
    terms = [
        (_transfer_seconds(p.workers, p.gradient_bytes, p.mbits), rounds(p.workers)) for p in points
    ]
    if np.linalg.matrix_rank(terms) < 2:
        raise ValueError("The chunks of the two measurements take the same time.")
    return CostModel(*map(float, np.linalg.solve(terms, [p.reducing for p in points])))


def _transfer_seconds(workers: int, gradient_bytes: float, mbits: float) -> float:
    return sent_bytes(workers, gradient_bytes) * 8 / (mbits * 1e6)


# Fitted to the measurements in docs/scaling.md; latency in seconds per round.
FITTED = CostModel(overhead=1.117, latency=7e-05)
WORKERS = (8, 64)
GBITS = (1, 10, 100)


# A model -> its parameters, whose gradients are float32, and the assumed seconds of computing per step.
JOBS = {
    "MNIST CNN": (225_034, 0.001),
    "ResNet-50": (25_600_000, 0.044),
    "Transformer": (100_000_000, 0.050),
}


def predictions() -> str:
    """Returns the predictions as a Markdown table."""
    rates = " | ".join(f"{gbits} Gbit/s" for gbits in GBITS)
    lines = [
        f"| computed | computing | workers | sent per step | rounds take | {rates} |",
        "|---|---:|---:|---:|---:|" + "---:|" * len(GBITS),
    ]
    for name in JOBS:
        lines += [_row(name, workers) for workers in WORKERS]
    return "\n".join(lines)


def _row(name: str, workers: int) -> str:
    parameters, computing = JOBS[name]
    cells = [
        f"{name}, {parameters / 1e6:.3g} M",
        _seconds(computing),
        str(workers),
        f"{sent_bytes(workers, 4 * parameters) / 1e6:.1f} MB",
        _seconds(FITTED.latency * rounds(workers)),
    ]
    for gbits in GBITS:
        step = computing + FITTED.reducing(workers, 4 * parameters, 1000 * gbits)
        cells.append(f"{_seconds(step)} ({100 * computing / step:.0f} %)")
    return f"| {' | '.join(cells)} |"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
