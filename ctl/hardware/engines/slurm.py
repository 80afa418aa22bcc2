"""Reads the tasks of a step of Slurm from the variables of https://slurm.schedmd.com/srun.html."""

from collections.abc import Mapping
import functools
import itertools
import re

from ctl.errors import UsageError
from ctl.hardware.cluster import Cluster
from ctl.hardware.engines.variables import FIRST_PORT, PORTS, assign, read_number

_PORTS_PER_STEP = 16  # at least
_STEPS_PER_JOB = 37  # steps of a job before its ports are those of the next job
_MAX_NUMBER = 10**9  # of a job


def read(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster of the step; None if it has one task.

    Task i of a node has port CTL_PORT + i. The default of CTL_PORT depends on the numbers of the job and
    the step, so that steps that share a node use different ports. A process that is not one of several
    tasks of a step, such as the shell of an allocation, is a run of one process.
    """
    number = functools.partial(read_number, environment, minimum=0, maximum=_MAX_NUMBER)
    if number("SLURM_STEP_NUM_TASKS") < 2:
        return None
    try:
        hosts = _expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
        counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError as error:
        raise UsageError(f"The variables of the Slurm step cannot be read: {error}.") from None
    nodes = [(host, i) for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    rank, node, local = (number(f"SLURM_{name}") for name in ("PROCID", "NODEID", "LOCALID"))
    first = [0, *itertools.accumulate(counts)]
    if (
        len(hosts) != len(counts)
        or node >= len(hosts)
        or rank >= len(nodes)
        or rank != first[node] + local
    ):
        raise UsageError(
            "The ranks of the Slurm step are not consecutive on each node: start it by srun "
            "--distribution=block, or set TF_CONFIG."
        )
    job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID", default="0")
    # The steps of neighboring jobs that share a node use different ports.
    width = max(_PORTS_PER_STEP, *counts)
    default = FIRST_PORT + width * ((_STEPS_PER_JOB * job + step) % (PORTS // width))
    port = read_number(
        environment, "CTL_PORT", minimum=1, maximum=65_535 - max(counts), default=str(default)
    )
    return assign(environment, [f"{host}:{port + i}" for host, i in nodes], rank)


def _expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list such as "gpu[07-09,12],login"."""
    # TensorFlow has this function, too, but its import takes seconds and prints messages.
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^]]*\])+", text):
        parts = re.split(r"\[([^]]*)\]", item)  # every second one is the content of brackets
        choices = [_expand_range(p) if i % 2 else [p] for i, p in enumerate(parts)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_range(text: str) -> list[str]:
    bounds = [part.partition("-") for part in text.split(",")]
    return [
        str(n).zfill(len(first))
        for first, _, last in bounds
        for n in range(int(first), int(last or first) + 1)
    ]


def _expand_counts(text: str) -> list[int]:
    """Returns the numbers of a list such as "2(x3),1"."""
    pairs = [part.rstrip(")").partition("(x") for part in text.split(",")]
    return [int(count) for count, _, times in pairs for _ in range(int(times or 1))]
