"""Reads the cluster from a list of hosts with one process each: SageMaker, SkyPilot, dstack."""

from collections.abc import Mapping
import json

from ctl.errors import UsageError
from ctl.hardware.cluster import ADDRESS, Cluster
from ctl.hardware.engines.variables import assign, read_number


def read(
    environment: Mapping[str, str], *, hosts: str, rank: str = "", current: str = ""
) -> Cluster | None:
    """Returns the cluster; None if there is one host.

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
    port = read_number(environment, "CTL_PORT", minimum=1, maximum=2**16 - 1, default="2222")
    addresses = [f"{name}:{port}" for name in names]
    if not addresses or not all(map(ADDRESS.fullmatch, addresses)):
        raise UsageError(f"{hosts} is {text!r}, but must be a list of hosts.")
    if len(addresses) == 1:
        return None
    if current:
        name = environment.get(current, "").strip()
        if name not in names:
            raise UsageError(f"{current} is {name!r}, which is not one of {hosts}, {text!r}.")
        index = names.index(name)
    else:
        index = read_number(environment, rank, minimum=0, maximum=len(names) - 1)
    return assign(environment, addresses, index)
