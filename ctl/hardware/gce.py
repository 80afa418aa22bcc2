"""Reads the processes of a run from an instance group of Google Compute Engine."""

from collections.abc import Callable
import time
from typing import Any
import urllib.request

from ctl.errors import Failure, UsageError, print_line

_METADATA = "http://metadata.google.internal/computeMetadata/v1/"
_POLL_SECONDS = 5.0


def read_instances(
    group: str,
    *,
    count: int,
    port: int,
    timeout: float = 600.0,
    make_service: Callable[[], Any] | None = None,
    read_metadata: Callable[[str], str] | None = None,
) -> tuple[list[str], int]:
    """Waits until the instances of a group run, and returns their addresses.

    TensorFlow's GCEClusterResolver lists them. This process runs on the instance whose internal address
    the metadata server reports, which the resolver does not know.

    Args:
        group: the name of the instance group, in the project and zone of this instance.
        count: the number of instances. It is required because the instance that starts first cannot
            detect how many others will follow.
        port: the port of the process on each instance.
        timeout: seconds to wait for the instances.
        make_service: makes the client of the Compute Engine API; None for the client of the package
            google-api-python-client, with the credentials of the instance.
        read_metadata: takes the name of a value, and reads it from the metadata server; None for the
            real server.

    Returns:
        host:port of each instance, in the same order on all of them, and the index of this one.

    Raises:
        UsageError: the metadata server does not answer, the package is not installed, there are too many
            instances, or this machine is none of them.
        Failure: the instances did not start in time.
    """
    import tensorflow as tf  # only here, because it takes seconds

    read_metadata = read_metadata or _read_metadata
    try:
        project = read_metadata("project/project-id")
        zone = read_metadata("instance/zone").rpartition("/")[-1]
        own = f"{read_metadata('instance/network-interfaces/0/ip')}:{port}"
    except OSError as error:
        raise UsageError(
            f"CTL_GCE_INSTANCE_GROUP is set, but the metadata server does not answer ({error}): unset "
            "it on machines outside of Google Compute Engine."
        ) from None
    resolver = tf.distribute.cluster_resolver.GCEClusterResolver(
        project,
        zone,
        group,
        port,
        credentials=None,  # the service has its own
        service=_Service((make_service or _make_service)()),
    )
    addresses = _wait_for_instances(resolver, group, count=count, timeout=timeout)
    if own not in addresses:
        raise UsageError(
            f"This machine ({own}) is no instance of the group {group} ({', '.join(addresses)}): start "
            "the program on the instances of the group, or fix CTL_GCE_INSTANCE_GROUP."
        )
    return addresses, addresses.index(own)


def _wait_for_instances(resolver: Any, group: str, *, count: int, timeout: float) -> list[str]:
    """Returns host:port of each instance once `count` instances of the group run."""
    end = time.monotonic() + timeout
    while True:
        try:
            addresses = resolver.cluster_spec().as_dict().get("worker", [])
        except KeyError:  # TensorFlow's resolver raises it if no instance runs yet
            addresses = []
        if len(addresses) > count:
            raise UsageError(
                f"The instance group {group} has {len(addresses)} instances, but CTL_WORKERS and CTL_PS "
                f"define {count} processes: set them to the size of the group."
            )
        if len(addresses) == count:
            return list(addresses)
        if time.monotonic() > end:
            raise Failure(
                f"{len(addresses)} of {count} instances of the group {group} run after {timeout:.0f} s: "
                "start the others, or set CTL_WORKERS to their number."
            )
        print_line(f"{len(addresses)} of {count} instances of the group {group} run; waiting.")
        time.sleep(_POLL_SECONDS)


class _Service:
    """The Compute Engine client with the arguments that GCEClusterResolver passes.

    TensorFlow 2.20 calls `listInstances(instanceGroups=...)`, but the API has `instanceGroup`, and the
    client raises "TypeError: Got an unexpected keyword argument instanceGroups".
    """

    def __init__(self, service: Any):
        self._service = service
        self.instances = service.instances

    def instanceGroups(self) -> "_Service":
        return self

    def listInstances(self, *, instanceGroups: str, **arguments: Any) -> Any:
        groups = self._service.instanceGroups()
        return groups.listInstances(instanceGroup=instanceGroups, **arguments)

    def listInstances_next(self, **arguments: Any) -> Any:
        return self._service.instanceGroups().listInstances_next(**arguments)


def _make_service() -> Any:
    try:
        from googleapiclient import discovery
    except ImportError:
        raise UsageError(
            "CTL_GCE_INSTANCE_GROUP requires the package google-api-python-client: install it with "
            "`uv sync --extra gce`."
        ) from None
    return discovery.build("compute", "v1")


def _read_metadata(name: str) -> str:
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return str(response.read().decode())
