"""Describes the processes of a run: their addresses, their roles, and which of them this one is.

The description comes from TF_CONFIG, from the variables of an Indexed Job of Kubernetes, or from Slurm.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

from ctl.errors import UsageError
from ctl.hardware import schedulers

ROLES = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run and the place of this process among them.

    Attributes:
        addresses: role -> the host:port of each of its tasks, in the order of their indices.
        role: the role of this process: "chief", "worker" or "ps" (parameter server).
        index: the 0-based index of this process within its role.
    """

    addresses: Mapping[str, Sequence[str]]
    role: str
    index: int

    @property
    def address(self) -> str:
        """The host:port of this process."""
        return self.addresses[self.role][self.index]

    @property
    def has_servers(self) -> bool:
        """Whether the cluster has parameter servers."""
        return bool(self.addresses.get("ps"))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that only one process may write.

        As in TensorFlow, worker 0 is the chief of a cluster without the role "chief".
        """
        if "chief" in self.addresses:
            return self.role == "chief"
        return self.role == "worker" and self.index == 0

    @property
    def name(self) -> str:
        """The name of this process in messages, such as "worker 1"."""
        return task_name(self.role, self.index)

    @property
    def size(self) -> int:
        """The number of processes, this one included."""
        return sum(len(tasks) for tasks in self.addresses.values())

    @property
    def num_workers(self) -> int:
        """The number of processes that compute gradients."""
        has_working_chief = "chief" in self.addresses and not self.has_servers
        return len(self.addresses.get("worker", ())) + has_working_chief

    def others(self) -> dict[str, str]:
        """Returns name -> address of every process but this one."""
        return {
            task_name(role, i): address
            for role, tasks in self.addresses.items()
            for i, address in enumerate(tasks)
            if (role, i) != (self.role, self.index)
        }

    def members(self) -> list[tuple[str, str]]:
        """Returns the name and the host of each process that trains, the chief first."""
        return [
            (task_name(role, i), address.rpartition(":")[0])
            for role in ("chief", "worker")
            for i, address in enumerate(self.addresses.get(role, ()))
        ]

    def spec(self) -> dict[str, list[str]]:
        """Returns the addresses in the form that `tf.train.ClusterSpec` requires."""
        return {role: list(tasks) for role, tasks in self.addresses.items()}

    def tf_config(self) -> str:
        """Returns the value of TF_CONFIG that describes this cluster to TensorFlow."""
        return json.dumps(
            {"cluster": self.spec(), "task": {"type": self.role, "index": self.index}}
        )


def task_name(role: str, index: int) -> str:
    """Returns the name of a process in messages, such as "worker 1"."""
    return "chief" if role == "chief" else f"{role} {index}"


def from_environment(environment: Mapping[str, str]) -> Cluster | None:
    """Reads the cluster that environment variables describe.

    Args:
        environment: variables of the process. The first of these that is set describes the cluster:
            1. TF_CONFIG.
            2. CTL_WORKERS: the processes are the pods of an Indexed Job of Kubernetes. The manifests
               in deploy/kubernetes also set JOB_COMPLETION_INDEX, CTL_JOB, CTL_SERVICE, CTL_PS and
               CTL_PORT.
            3. The variables of a Slurm step: each task of the step is one process, and CTL_PS of them
               are parameter servers.

    Returns:
        The cluster; None for a run of one process.

    Raises:
        UsageError: the description is invalid.
    """
    # An empty variable counts as not set, because templates of manifests leave variables empty.
    if environment.get("TF_CONFIG", "").strip():
        return from_tf_config(environment["TF_CONFIG"])
    if environment.get("CTL_WORKERS", "").strip():
        tasks: Any = schedulers.read_indexed_job(environment)
    else:
        tasks = schedulers.read_slurm_step(environment)
    if tasks is None:
        return None
    addresses, index = tasks
    servers = schedulers.count_servers(environment)
    workers = len(addresses) - servers - bool(servers)  # parameter servers require a chief
    if workers < 1:
        raise UsageError(
            f"CTL_PS is {servers}, but the run has {len(addresses)} tasks, and a chief and a worker "
            f"are required in addition: start at least {servers + 2} tasks."
        )
    return _make_clusters(_list_roles(workers, servers), addresses)[index]


def from_tf_config(text: str) -> Cluster | None:
    """Parses and validates the value of TF_CONFIG.

    Args:
        text: a JSON object with the keys "cluster" and "task", as `tf.distribute` defines it.

    Returns:
        The cluster without its evaluator; None if the text has no cluster, which some platforms set
        for a single process, or if this process is the evaluator.

    Raises:
        UsageError: the text is invalid.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's recursion
        raise _tf_config_error(f"is not JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
        raise _tf_config_error("must be a JSON object whose 'cluster' is an object")
    if not config.get("cluster"):
        return None
    addresses = {role: _parse_tasks(role, tasks) for role, tasks in config["cluster"].items()}
    _check_roles(addresses)
    # An evaluator takes no part in the collectives: it is a run of one process.
    addresses.pop("evaluator", None)
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise _tf_config_error("must identify this process by a 'task' with 'type' and 'index'")
    role, index = task["type"], _parse_index(task["index"])
    if role == "evaluator":
        if index:
            raise _tf_config_error(f"has the task index {index}, but a run has one evaluator")
        return None
    if not isinstance(role, str) or role not in addresses:
        raise _tf_config_error(
            f"has the task type {role!r}, but the cluster has only {', '.join(addresses)}"
        )
    if not 0 <= index < len(addresses[role]):
        raise _tf_config_error(
            f"has the task index {index}, but the indices of {role!r} are 0 to "
            f"{len(addresses[role]) - 1}"
        )
    return Cluster(addresses, role, index)


def make_local_clusters(*, workers: int, servers: int, ports: Sequence[int]) -> list[Cluster]:
    """Describes a run of several processes on this machine.

    Args:
        workers: number of workers.
        servers: number of parameter servers. A cluster with parameter servers has a chief in
            addition to its workers; without them worker 0 is the chief.
        ports: a free port for each process.

    Returns:
        The same cluster once per process, with the role and index of that process.
    """
    roles = _list_roles(workers, servers)
    return _make_clusters(roles, [f"localhost:{port}" for port in ports])


def _list_roles(workers: int, servers: int) -> list[str]:
    # The pods of an Indexed Job get these roles in the order of their completion indices.
    return (["chief"] if servers else []) + ["worker"] * workers + ["ps"] * servers


def _make_clusters(roles: Sequence[str], addresses: Sequence[str]) -> list[Cluster]:
    tasks: dict[str, list[str]] = {}
    clusters = []
    for role, address in zip(roles, addresses, strict=True):
        index = len(tasks.setdefault(role, []))
        tasks[role].append(address)
        clusters.append(Cluster(tasks, role, index))  # all share `tasks`, complete after the loop
    return clusters


def _parse_tasks(role: str, tasks: Any) -> list[str]:
    if role not in ROLES:
        raise _tf_config_error(f"has the unknown role {role!r} (known: {', '.join(ROLES)})")
    if isinstance(tasks, dict):  # TensorFlow's sparse form, {"0": "host:port"}
        raise _tf_config_error(f"lists the tasks of {role!r} as an object, not as an array")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _tf_config_error(f"must list the tasks of {role!r} as strings host:port")
    for task in tasks:
        match = schedulers.ADDRESS.fullmatch(task)
        if not match or not 0 < int(match[2]) < 2**16:
            raise _tf_config_error(f"has the address {task!r} for {role!r}, which is not host:port")
    return tasks


def _check_roles(addresses: Mapping[str, Sequence[str]]) -> None:
    # If two tasks had one address, one could not bind its port, and the others would wait for it.
    counts = collections.Counter(a for tasks in addresses.values() for a in tasks)
    repeated = sorted(address for address, count in counts.items() if count > 1)
    if repeated:
        raise _tf_config_error(f"assigns {repeated[0]} to more than one task")
    for role in ("chief", "evaluator"):
        if len(addresses.get(role, [])) > 1:
            raise _tf_config_error(f"has more than one {role}")
    if addresses.get("ps") and not (addresses.get("chief") and addresses.get("worker")):
        raise _tf_config_error("has parameter servers, which require a chief and workers")


def _parse_index(value: Any) -> int:
    # Some platforms write the index as a string. bool is a subclass of int.
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch("-?[0-9]{1,18}", text):
        raise _tf_config_error(f"has the task index {value!r}, which is not a whole number")
    return int(text)


def _tf_config_error(problem: str) -> UsageError:
    return UsageError(
        f"TF_CONFIG {problem}: fix it, or start the processes with python -m ctl.launch, which sets "
        "it."
    )
