"""Reads the pods of an Indexed Job of Kubernetes from the variables that deploy/kubernetes sets."""

from collections.abc import Mapping

from ctl.errors import UsageError
from ctl.hardware.cluster import ADDRESS, Cluster
from ctl.hardware.engines.variables import MAX_TASKS, assign, count_servers, read_number


def read(environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster of the Job."""
    workers = read_number(environment, "CTL_WORKERS", minimum=1, maximum=MAX_TASKS)
    servers = count_servers(environment)
    port = read_number(environment, "CTL_PORT", minimum=1, maximum=2**16 - 1, default="2222")
    index = read_number(environment, "JOB_COMPLETION_INDEX", minimum=0, maximum=2 * MAX_TASKS)
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
    return assign(environment, [f"{job}-{i}.{service}:{port}" for i in range(count)], index)
