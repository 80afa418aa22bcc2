"""Recognizes the engine that has started the processes of a run, and reads the cluster from it.

`ENGINES` has a row per engine: Slurm, MPI, Kubernetes, SageMaker and others. A new engine is a row, and
a module with a reader if none of the existing ones fits.
"""

from collections.abc import Mapping, MutableMapping
import dataclasses

from ctl.errors import UsageError
from ctl.hardware import load
from ctl.hardware.cluster import ADDRESS, Cluster


@dataclasses.dataclass(frozen=True)
class Engine:
    """One row of the table.

    Attributes:
        name: the name in messages.
        variable: the environment variable that identifies the engine.
        reader: the module of this package whose function `read(environment, **variables)` returns the
            cluster; None for a run of one process.
        variables: argument of the reader -> the name of the environment variable that it reads.
        inner: whether the engine also starts processes in a job of another engine, whose variables
            then describe something else, such as the job's nodes. Otherwise they must agree.
        token: the variable with a secret that the engine gives to all processes of a job; "" for none.
    """

    name: str
    variable: str
    reader: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inner: bool = False
    token: str = ""

    def read(self, environment: Mapping[str, str]) -> Cluster | None:
        """Returns the cluster that environment variables describe; None for a run of one process."""
        return load(f"engines.{self.reader}:read")(environment, **self.variables)


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
    if cluster and cluster.meeting and not ADDRESS.fullmatch(cluster.meeting):
        raise UsageError(
            f"The {cluster.size} processes know their ranks, but not each other's addresses: set "
            "MASTER_ADDR to the host of rank 0 in all of them, such as by `mpirun -x MASTER_ADDR=HOST`."
        )
    return cluster


def exchange_addresses(environment: MutableMapping[str, str], *, timeout: float) -> None:
    """Lets processes that know only their ranks exchange addresses, and sets TF_CONFIG.

    Args:
        environment: variables of this process. Nothing changes if they have the addresses already.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: the port of rank 0 is in use, or the processes belong to different runs.
        Failure: a process did not start within `timeout` seconds.
    """
    cluster, (engine, _) = from_environment(environment), _recognize(environment)
    if cluster and engine and cluster.meeting:
        token = environment.get("CTL_TOKEN") or environment.get(engine.token, "")
        environment.update(load("rendezvous:meet")(cluster, timeout=timeout, token=token))


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


_RANK = {"rank": "RANK", "size": "WORLD_SIZE"}
# From the inside out: the first rows start processes in jobs of the later ones.
ENGINES = (
    Engine("TF_CONFIG", "TF_CONFIG", "tf_config", inner=True),
    Engine("Kubernetes", "CTL_WORKERS", "kubernetes", inner=True),
    Engine("Open MPI", "OMPI_COMM_WORLD_SIZE", "ranks", {
        "rank": "OMPI_COMM_WORLD_RANK", "size": "OMPI_COMM_WORLD_SIZE",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE", "job": "PMIX_NAMESPACE"}, inner=True,
        token="OMPI_MCA_orte_precondition_transports"),
    Engine("MPICH", "PMI_SIZE", "ranks", {
        "rank": "PMI_RANK", "size": "PMI_SIZE", "local_size": "MPI_LOCALNRANKS"}, inner=True),
    Engine("torchrun", "TORCHELASTIC_RUN_ID", "ranks", _RANK, inner=True),
    Engine("MASTER_ADDR", "RANK", "ranks", _RANK),
    Engine("Kubeflow Trainer", "PET_NNODES", "ranks", {
        "rank": "PET_NODE_RANK", "size": "PET_NNODES",
        "master": "PET_MASTER_ADDR", "port": "PET_MASTER_PORT"}),
    Engine("Slurm", "SLURM_STEP_NUM_TASKS", "slurm"),
    Engine("SageMaker", "SM_HOSTS", "hosts", {"hosts": "SM_HOSTS", "current": "SM_CURRENT_HOST"}),
    Engine("SkyPilot", "SKYPILOT_NODE_IPS", "hosts", {
        "hosts": "SKYPILOT_NODE_IPS", "rank": "SKYPILOT_NODE_RANK"}),
    Engine("dstack", "DSTACK_NODES_IPS", "hosts", {
        "hosts": "DSTACK_NODES_IPS", "rank": "DSTACK_NODE_RANK"}),
)  # fmt: skip
