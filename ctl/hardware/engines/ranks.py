"""Reads engines that give a process its rank, but not the addresses of the others: MPI, torchrun."""

from collections.abc import Mapping
import zlib

from ctl.hardware.cluster import Cluster
from ctl.hardware.engines.variables import FIRST_PORT, MAX_TASKS, PORTS, assign, read_number

_TORCH_PORT = "29500"  # the default of torchrun


def read(
    environment: Mapping[str, str],
    *, rank: str, size: str, local_size: str = "", job: str = "", master: str = "MASTER_ADDR",
    port: str = "MASTER_PORT",
) -> Cluster | None:  # fmt: skip
    """Returns the cluster, whose processes meet at an address; None if there is one process.

    Args:
        environment: variables of the process.
        rank: the variable with the rank of this process.
        size: the variable with the number of processes.
        local_size: the variable with the number of processes on this host.
        job: the variable with the identity of the job, from which the default port follows.
        master: the variable with the host of rank 0.
        port: the variable with a port of that host, at which the processes meet.
    """
    if not environment.get(size, "").strip():
        return None
    count = read_number(environment, size, minimum=1, maximum=MAX_TASKS)
    if count == 1:
        return None
    index = read_number(environment, rank, minimum=0, maximum=count - 1)
    host = environment.get(master, "").strip()
    if not host and environment.get(local_size) == environment[size]:
        host = "localhost"
    identity = environment.get(job, "").encode()
    default = str(FIRST_PORT + zlib.crc32(identity) % PORTS) if identity else _TORCH_PORT
    number = read_number(environment, port, minimum=1, maximum=2**16 - 1, default=default)
    # There, the agent of torchrun itself listens at the port.
    number += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ranks = [f"rank-{i}:{number}" for i in range(count)]
    return assign(environment, ranks, index, meeting=f"{host}:{number}")
