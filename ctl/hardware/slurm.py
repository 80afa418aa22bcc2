"""Reads the tasks of a Slurm job step from the environment that srun sets."""

from collections.abc import Mapping
import itertools

from ctl.errors import UsageError

_PORTS_PER_STEP = 16


def read_tasks(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """Returns the addresses of the tasks of a step, and the index of this process.

    Task i of a node has port CTL_PORT + i. The default of CTL_PORT depends on the numbers of the job and
    the step, so that steps that share a node use different ports.

    Args:
        environment: variables of the process. https://slurm.schedmd.com/srun.html describes them.

    Returns:
        host:port of each task in the order of their ranks, and the rank of this process; None if the
        process is not one of several tasks of a step, such as the shell of an allocation.

    Raises:
        UsageError: the variables are invalid, or Slurm distributed the tasks in another order.
    """
    if int(_read(environment, "SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    # The functions of TensorFlow's SlurmClusterResolver, which itself would also choose the GPUs.
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    try:
        hosts = slurm_cluster_resolver.expand_hostlist(_read(environment, "SLURM_STEP_NODELIST"))
        counts = slurm_cluster_resolver.expand_tasks_per_node(
            _read(environment, "SLURM_STEP_TASKS_PER_NODE")
        )
    except ValueError as error:
        raise UsageError(f"The variables of the Slurm step cannot be read: {error}.") from None
    nodes = [(host, i) for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    rank = int(_read(environment, "SLURM_PROCID"))
    node, local = int(_read(environment, "SLURM_NODEID")), int(_read(environment, "SLURM_LOCALID"))
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
    step = int(_read(environment, "SLURM_JOB_ID")) + int(_read(environment, "SLURM_STEP_ID", "0"))
    # Below the ports that Linux gives to outgoing connections, from 32768 on.
    default = 10_000 + _PORTS_PER_STEP * step % 20_000
    port = int(_read(environment, "CTL_PORT", str(default)))
    if not 0 < port <= 65_535 - max(counts):
        raise UsageError(
            f"CTL_PORT is {port}, but must be the number of a free port, such as 2222."
        )
    return [f"{host}:{port + i}" for host, i in nodes], rank


def _read(environment: Mapping[str, str], name: str, default: str = "") -> str:
    text = environment.get(name, "").strip() or default
    is_list = name in ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    if not text or not (is_list or (text.isascii() and text.isdecimal())):
        raise UsageError(
            f"{name} is {text!r}, but must be {'a list' if is_list else 'a number'}, as srun sets it: "
            "start the processes by srun, or set TF_CONFIG."
        )
    return text
