"""Reads numbers from environment variables of engines, and gives the processes their roles."""

from collections.abc import Mapping
import re

from ctl.errors import UsageError
from ctl.hardware.cluster import Cluster, make_clusters

MAX_TASKS = 100_000  # Kubernetes allows this many completions of an Indexed Job
FIRST_PORT, PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections


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
    return read_number(environment, "CTL_PS", minimum=0, maximum=MAX_TASKS, default="0")


def assign(
    environment: Mapping[str, str], addresses: list[str], rank: int, *, meeting: str = ""
) -> Cluster:
    """Returns the cluster of processes that have addresses, or ranks in their place."""
    servers = count_servers(environment)
    workers = len(addresses) - servers - bool(servers)  # parameter servers require a chief
    if workers < 1:
        raise UsageError(
            f"CTL_PS is {servers}, but the run has {len(addresses)} tasks, and a chief and a worker "
            f"are required in addition: start at least {servers + 2} tasks."
        )
    clusters = make_clusters(addresses, workers=workers, servers=servers, meeting=meeting)
    return clusters[rank]
