"""Reads the processes of a run that a scheduler has started: Slurm, or an Indexed Job of Kubernetes."""

from collections.abc import Mapping
import itertools
import re

from ctl.errors import UsageError

# A label of a DNS name has at most 63 characters. IPv6 addresses are written in brackets.
_HOST = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
# re.ASCII: \d and \w would otherwise accept digits such as "٣", which gRPC rejects.
ADDRESS = re.compile(rf"(\[[0-9a-fA-F:]+\]|{_HOST}):(\d{{1,5}})", re.ASCII)
_PORTS_PER_STEP = 16  # at least
_STEPS_PER_JOB = 37  # steps of a job before its ports are those of the next job
_MAX_TASKS = 100_000  # Kubernetes allows this many completions of an Indexed Job


def read_number(
    environment: Mapping[str, str], name: str, *, minimum: int, maximum: int, default: str = ""
) -> int:
    """Reads a whole number from an environment variable.

    Args:
        environment: variables of the process.
        name: the name of the variable.
        minimum: the smallest valid number.
        maximum: the largest valid number.
        default: the number if the variable is empty or not set; "" if it must be set.

    Raises:
        UsageError: the value is not a whole number from `minimum` to `maximum`.
    """
    text = environment.get(name, "").strip() or default
    # Kubernetes sets variables such as CTL_PORT=tcp://10.0.0.1 for a Service of the same name.
    if not re.fullmatch("[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise UsageError(
            f"{name} is {text!r}, but must be a whole number from {minimum} to {maximum}."
        )
    return int(text)


def count_servers(environment: Mapping[str, str]) -> int:
    """Returns the number of parameter servers that CTL_PS sets."""
    return read_number(environment, "CTL_PS", minimum=0, maximum=_MAX_TASKS, default="0")


def read_indexed_job(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns the addresses of the pods of an Indexed Job, and the index of this process.

    Args:
        environment: variables of the process, of which the manifests in deploy/kubernetes set
            CTL_WORKERS, CTL_PS, CTL_JOB, CTL_SERVICE and CTL_PORT.

    Raises:
        UsageError: the variables are invalid.
    """
    workers = read_number(environment, "CTL_WORKERS", minimum=1, maximum=_MAX_TASKS)
    servers = count_servers(environment)
    port = read_number(environment, "CTL_PORT", minimum=1, maximum=2**16 - 1, default="2222")
    index = read_number(environment, "JOB_COMPLETION_INDEX", minimum=0, maximum=2 * _MAX_TASKS)
    for name in ("CTL_JOB", "CTL_SERVICE"):
        if not environment.get(name, "").strip():
            raise UsageError(f"CTL_WORKERS is set but {name} is not: set it in the Job's manifest.")
    job, service = environment["CTL_JOB"].strip(), environment["CTL_SERVICE"].strip()
    if not ADDRESS.fullmatch(f"{job}-{index}.{service}:{port}"):
        raise UsageError(
            f"CTL_JOB is {job!r} and CTL_SERVICE is {service!r}, which do not form a valid host "
            "name: set them to the names of the Job and of its Service."
        )
    count = workers + servers + bool(servers)  # parameter servers require a chief
    if index >= count:
        raise UsageError(
            f"JOB_COMPLETION_INDEX is {index}, but CTL_WORKERS and CTL_PS define {count} "
            f"processes: set the Job's completions to {count}."
        )
    # A headless Service gives each pod of the Job the stable host name JOB-INDEX.SERVICE.
    return [f"{job}-{i}.{service}:{port}" for i in range(count)], index


def read_slurm_step(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
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
    from ctl.private.tensorflow import slurm_cluster_resolver

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
    job, step = (
        int(_read(environment, f"SLURM_{k}_ID", d)) for k, d in (("JOB", ""), ("STEP", "0"))
    )
    # The steps of neighboring jobs that share a node use different ports, below those that Linux gives
    # to outgoing connections, from 32768 on.
    width = max(_PORTS_PER_STEP, *counts)
    default = 10_000 + width * ((_STEPS_PER_JOB * job + step) % (20_000 // width))
    port = read_number(
        environment, "CTL_PORT", minimum=1, maximum=65_535 - max(counts), default=str(default)
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
