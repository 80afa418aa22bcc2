"""Recognizes the engine that has started the processes of a run, and reads the cluster from it.

`ENGINES` has a row per engine: Slurm, MPI, Kubernetes, SageMaker and others. A new engine is a row, and
a reader if none of the existing ones fits.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
import json
import re
import zlib

from ctl.errors import UsageError
from ctl.hardware import tf_config
from ctl.hardware.cluster import Cluster, make_clusters

_PORTS_PER_STEP = 16  # at least
_STEPS_PER_JOB = 37  # steps of a job before its ports are those of the next job
_MAX_TASKS = 100_000  # Kubernetes allows this many completions of an Indexed Job
_MAX_NUMBER = 10**9  # of a job of Slurm
_FIRST_PORT, _PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections
_TORCH_PORT = "29500"  # the default of torchrun


@dataclasses.dataclass(frozen=True)
class Engine:
    """One row of the table.

    Attributes:
        name: the name in messages.
        variable: the environment variable that identifies the engine.
        read: environment -> the cluster; None for a run of one process.
        inner: whether the engine also starts processes in a job of another engine, whose variables
            then describe something else, such as the job's nodes. Otherwise they must agree.
    """

    name: str
    variable: str
    read: Callable[[Mapping[str, str]], Cluster | None]
    inner: bool = False


def from_environment(environment: Mapping[str, str]) -> Cluster | None:
    """Reads the cluster that environment variables describe.

    Args:
        environment: variables of the process. Of the engines whose variable is set, the first one in
            `ENGINES` describes the cluster.

    Returns:
        The cluster; None for a run of one process.

    Raises:
        UsageError: the description is invalid, or two engines contradict each other.
    """
    cluster = _recognize(environment)[1]
    if cluster and cluster.meeting and not tf_config.ADDRESS.fullmatch(cluster.meeting):
        raise UsageError(
            f"The {cluster.size} processes know their ranks, but not each other's addresses: set "
            "MASTER_ADDR to the host of rank 0 in all of them, such as by `mpirun -x MASTER_ADDR=HOST`."
        )
    return cluster


def describe(environment: Mapping[str, str]) -> str:
    """Returns the engine that was recognized, and why, for `ctl devices`."""
    engine, cluster = _recognize(environment)
    if not engine:
        return "none: a run of one process"
    place = f"{cluster.name} of {cluster.size} processes" if cluster else "a run of one process"
    ignored = [e.variable for e in ENGINES if e is not engine and _is_set(environment, e.variable)]
    rest = f"; {', '.join(ignored)} not used" if ignored else ""
    return f"{engine.name}, since {engine.variable} is set: {place}{rest}"


def _recognize(environment: Mapping[str, str]) -> tuple[Engine | None, Cluster | None]:
    chosen: Engine | None = None
    cluster: Cluster | None = None
    for engine in ENGINES:
        if not _is_set(environment, engine.variable):
            continue
        try:
            other = engine.read(environment)
        except UsageError:
            if cluster and chosen and chosen.inner:
                continue
            raise
        if not cluster:
            chosen, cluster = engine, other
            if engine.variable == "TF_CONFIG" or (cluster and engine.inner and not cluster.meeting):
                break
        elif other and (other.name, other.size) == (cluster.name, cluster.size):
            if cluster.meeting and not other.meeting:  # the other engine knows the addresses
                chosen, cluster = engine, other
        elif other and chosen and not chosen.inner:
            raise UsageError(
                f"{chosen.variable} and {engine.variable} contradict each other: by {chosen.name} "
                f"this is {cluster.name} of {cluster.size} processes, and by {engine.name} "
                f"{other.name} of {other.size}; unset the variables of one of them, or set TF_CONFIG."
            )
    return chosen, cluster


def _is_set(environment: Mapping[str, str], variable: str) -> bool:
    # An empty variable counts as not set, because templates of manifests leave variables empty.
    return bool(environment.get(variable, "").strip())


def _assign(
    environment: Mapping[str, str], addresses: list[str], rank: int, *, meeting: str = ""
) -> Cluster:
    """Returns the cluster of processes that have addresses, or ranks in their place."""
    servers = _count_servers(environment)
    workers = len(addresses) - servers - bool(servers)  # parameter servers require a chief
    if workers < 1:
        raise UsageError(
            f"CTL_PS is {servers}, but the run has {len(addresses)} tasks, and a chief and a worker "
            f"are required in addition: start at least {servers + 2} tasks."
        )
    clusters = make_clusters(addresses, workers=workers, servers=servers, meeting=meeting)
    return clusters[rank]


def _read_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    text, workers = environment["TF_CONFIG"], 0
    if "sparseCluster" in text:
        limits = {"minimum": 0, "maximum": _MAX_TASKS}
        workers = _read_number(environment, "CTL_WORKERS", default="0", **limits)
    return tf_config.parse(text, workers=workers)


def _read_number(
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


def _count_servers(environment: Mapping[str, str]) -> int:
    """Returns the number of parameter servers that CTL_PS sets."""
    return _read_number(environment, "CTL_PS", minimum=0, maximum=_MAX_TASKS, default="0")


def _read_indexed_job(environment: Mapping[str, str]) -> Cluster:
    """Reads the pods of an Indexed Job from the variables that deploy/kubernetes sets."""
    workers = _read_number(environment, "CTL_WORKERS", minimum=1, maximum=_MAX_TASKS)
    servers = _count_servers(environment)
    port = _read_number(environment, "CTL_PORT", minimum=1, maximum=2**16 - 1, default="2222")
    index = _read_number(environment, "JOB_COMPLETION_INDEX", minimum=0, maximum=2 * _MAX_TASKS)
    for name in ("CTL_JOB", "CTL_SERVICE"):
        if not environment.get(name, "").strip():
            raise UsageError(f"CTL_WORKERS is set but {name} is not: set it in the Job's manifest.")
    job, service = environment["CTL_JOB"].strip(), environment["CTL_SERVICE"].strip()
    if not tf_config.ADDRESS.fullmatch(f"{job}-{index}.{service}:{port}"):
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
    return _assign(environment, [f"{job}-{i}.{service}:{port}" for i in range(count)], index)


def _read_slurm_step(environment: Mapping[str, str]) -> Cluster | None:
    """Reads the tasks of a step from the variables of https://slurm.schedmd.com/srun.html.

    Task i of a node has port CTL_PORT + i. The default of CTL_PORT depends on the numbers of the job and
    the step, so that steps that share a node use different ports. A process that is not one of several
    tasks of a step, such as the shell of an allocation, is a run of one process.
    """
    read = functools.partial(_read_number, environment, minimum=0, maximum=_MAX_NUMBER)
    if read("SLURM_STEP_NUM_TASKS") < 2:
        return None
    try:
        hosts = _expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
        counts = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError as error:
        raise UsageError(f"The variables of the Slurm step cannot be read: {error}.") from None
    nodes = [(host, i) for host, count in zip(hosts, counts, strict=False) for i in range(count)]
    rank, node, local = (read(f"SLURM_{name}") for name in ("PROCID", "NODEID", "LOCALID"))
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
    job, step = read("SLURM_JOB_ID"), read("SLURM_STEP_ID", default="0")
    # The steps of neighboring jobs that share a node use different ports.
    width = max(_PORTS_PER_STEP, *counts)
    default = _FIRST_PORT + width * ((_STEPS_PER_JOB * job + step) % (_PORTS // width))
    port = _read_number(
        environment, "CTL_PORT", minimum=1, maximum=65_535 - max(counts), default=str(default)
    )
    return _assign(environment, [f"{host}:{port + i}" for host, i in nodes], rank)


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


def _read_hosts(
    environment: Mapping[str, str], *, hosts: str, rank: str = "", current: str = ""
) -> Cluster | None:
    """Reads a list of hosts with one process each.

    Args:
        environment: variables of the process.
        hosts: the variable with the hosts, a JSON array or lines.
        rank: the variable with the index of this host.
        current: the variable with the name of this host, in place of `rank`.
    """
    text = environment[hosts].strip()
    try:
        names = json.loads(text) if text.startswith("[") else text.split()
    except ValueError:
        names = []
    port = _read_number(environment, "CTL_PORT", minimum=1, maximum=2**16 - 1, default="2222")
    addresses = [f"{name}:{port}" for name in names]
    if not addresses or not all(map(tf_config.ADDRESS.fullmatch, addresses)):
        raise UsageError(f"{hosts} is {text!r}, but must be a list of hosts.")
    if len(addresses) == 1:
        return None
    if current:
        name = environment.get(current, "").strip()
        if name not in names:
            raise UsageError(f"{current} is {name!r}, which is not one of {hosts}, {text!r}.")
        index = names.index(name)
    else:
        index = _read_number(environment, rank, minimum=0, maximum=len(names) - 1)
    return _assign(environment, addresses, index)


def _read_ranks(
    environment: Mapping[str, str],
    *,
    rank: str,
    size: str,
    local_size: str = "",
    job: str = "",
    master: str = "MASTER_ADDR",
    port: str = "MASTER_PORT",
) -> Cluster | None:
    """Reads an engine that gives a process its rank, but not the addresses of the others.

    Args:
        environment: variables of the process.
        rank: the variable with the rank of this process.
        size: the variable with the number of processes.
        local_size: the variable with the number of processes on this host.
        job: the variable with the identity of the job, from which the default port follows.
        master: the variable with the host of rank 0.
        port: the variable with a port of that host, at which the processes meet.
    """
    if not _is_set(environment, size):
        return None
    count = _read_number(environment, size, minimum=1, maximum=_MAX_TASKS)
    if count == 1:
        return None
    index = _read_number(environment, rank, minimum=0, maximum=count - 1)
    host = environment.get(master, "").strip()
    if not host and environment.get(local_size) == environment[size]:
        host = "localhost"
    identity = environment.get(job, "").encode()
    default = str(_FIRST_PORT + zlib.crc32(identity) % _PORTS) if identity else _TORCH_PORT
    number = _read_number(environment, port, minimum=1, maximum=2**16 - 1, default=default)
    # There, the agent of torchrun itself listens at the port.
    number += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ranks = [f"rank-{i}:{number}" for i in range(count)]
    return _assign(environment, ranks, index, meeting=f"{host}:{number}")


# From the inside out: the first rows start processes in jobs of the later ones.
ENGINES = (
    Engine("TF_CONFIG", "TF_CONFIG", _read_tf_config, inner=True),
    Engine("Kubernetes", "CTL_WORKERS", _read_indexed_job, inner=True),
    Engine("Open MPI", "OMPI_COMM_WORLD_SIZE", functools.partial(
        _read_ranks, rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE", job="PMIX_NAMESPACE"), inner=True),
    Engine("MPICH", "PMI_SIZE", functools.partial(
        _read_ranks, rank="PMI_RANK", size="PMI_SIZE", local_size="MPI_LOCALNRANKS"), inner=True),
    Engine("torchrun", "TORCHELASTIC_RUN_ID", functools.partial(
        _read_ranks, rank="RANK", size="WORLD_SIZE"), inner=True),
    Engine("MASTER_ADDR", "RANK", functools.partial(_read_ranks, rank="RANK", size="WORLD_SIZE")),
    Engine("Kubeflow Trainer", "PET_NNODES", functools.partial(
        _read_ranks, rank="PET_NODE_RANK", size="PET_NNODES",
        master="PET_MASTER_ADDR", port="PET_MASTER_PORT")),
    Engine("Slurm", "SLURM_STEP_NUM_TASKS", _read_slurm_step),
    Engine("SageMaker", "SM_HOSTS", functools.partial(
        _read_hosts, hosts="SM_HOSTS", current="SM_CURRENT_HOST")),
    Engine("SkyPilot", "SKYPILOT_NODE_IPS", functools.partial(
        _read_hosts, hosts="SKYPILOT_NODE_IPS", rank="SKYPILOT_NODE_RANK")),
    Engine("dstack", "DSTACK_NODES_IPS", functools.partial(
        _read_hosts, hosts="DSTACK_NODES_IPS", rank="DSTACK_NODE_RANK")),
)  # fmt: skip
