"""Describes the processes of a run: their addresses, their roles, and which of them this one is.

`hardware.engines` reads the description from the environment.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import re

# A label of a DNS name has at most 63 characters. IPv6 addresses are written in brackets.
_HOST = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
# re.ASCII: \d and \w would otherwise accept digits such as "٣", which gRPC rejects.
ADDRESS = re.compile(rf"(\[[0-9a-fA-F:]+\]|{_HOST}):(\d{{1,5}})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run and the place of this process among them.

    Attributes:
        addresses: role -> the host:port of each of its tasks, in the order of their indices.
        role: the role of this process: "chief", "worker" or "ps" (parameter server).
        index: the 0-based index of this process within its role.
        meeting: host:port at which the processes exchange their addresses, if the engine does not tell
            them; `addresses` then has the ranks. "" if the addresses are known.
    """

    addresses: Mapping[str, Sequence[str]]
    role: str
    index: int
    meeting: str = ""

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

    def listens_on(self) -> str:
        """Returns the host to listen on: the loopback interface, or "" for all interfaces."""
        addresses = [self.meeting] if self.meeting else [self.address, *self.others().values()]
        hosts = {address.rpartition(":")[0] for address in addresses}
        return "localhost" if hosts <= {"localhost", "127.0.0.1"} else ""

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
    return make_clusters([f"localhost:{port}" for port in ports], workers=workers, servers=servers)


def make_clusters(
    addresses: Sequence[str], *, workers: int, servers: int, meeting: str = ""
) -> list[Cluster]:
    """Gives the processes of a run their roles: the chief, the workers, and the parameter servers.

    Args:
        addresses: host:port of each process, in the order of the ranks.
        workers: number of workers.
        servers: number of parameter servers; with any, the first process is the chief.
        meeting: of `Cluster`.

    Returns:
        The same cluster once per process, with the role and index of that process.
    """
    roles = ["chief"] * bool(servers) + ["worker"] * workers + ["ps"] * servers
    tasks: dict[str, list[str]] = {}
    clusters = []
    for role, address in zip(roles, addresses, strict=True):
        index = len(tasks.setdefault(role, []))
        tasks[role].append(address)
        # All share `tasks`, which is complete after the loop.
        clusters.append(Cluster(tasks, role, index, meeting))
    return clusters
