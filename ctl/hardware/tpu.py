"""Detects a TPU that this installation can use, and builds the strategy for it.

The detection does not import TensorFlow, which cannot answer the question: its resolver accepts a
local TPU on any machine, and with a libtpu that does not match, the import aborts or hangs.
"""

from collections.abc import MutableMapping
import pathlib
import re
import socket
from typing import TYPE_CHECKING

from ctl.errors import UsageError, count
from ctl.hardware.strategies import StrategyOptions
from ctl.version import installed_versions

if TYPE_CHECKING:
    import tensorflow as tf

_PCI_DEVICES = pathlib.Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # vendor of TPUs, but also of the network cards and disks of Google's machines
_GENERATIONS = {  # PCI device id -> generation
    "0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e",
    "0x0076": "v7x",
}  # fmt: skip
_NEWEST_LIBTPU = "0.0.30"  # with a newer one, `import tensorflow` aborts the process
_CONNECT_TIMEOUT = 5.0  # seconds; TensorFlow would try for minutes


def list_chips() -> list[str]:
    """Lists the generation, such as "v5e", of each TPU chip of this machine."""
    generations = [
        _GENERATIONS.get(_read(device / "device"), "")
        for device in sorted(_PCI_DEVICES.glob("*"))
        if _read(device / "vendor") == _GOOGLE
    ]
    return [generation for generation in generations if generation]


def skip_metadata_server(environment: MutableMapping[str, str]) -> None:
    """Keeps `import tensorflow` from waiting minutes for a metadata server on a machine without TPU.

    A value that the user has set is not changed.
    """
    if not list_chips():
        environment.setdefault("TPU_SKIP_MDS_QUERY", "1")


def find_obstacle(address: str = "") -> str | None:
    """Returns why this installation cannot use a TPU, or None if it can.

    Args:
        address: name or address of a TPU; "" for a TPU of this machine.
    """
    packages = ("tensorflow-tpu", "libtpu")
    versions = installed_versions(*packages)
    for name in packages:
        if name not in versions:
            return f"{name} is not installed (it is part of ctl's extra `tpu`)"
    libtpu = versions["libtpu"]
    if _split_version(libtpu) > _split_version(_NEWEST_LIBTPU):
        return f"libtpu is {libtpu}, but TensorFlow aborts with a version after {_NEWEST_LIBTPU}"
    if not address and not list_chips():
        return "this machine has no TPU chip on its PCI bus"
    return None


def check(options: StrategyOptions) -> None:
    """Rejects a TPU that cannot be used, before TensorFlow is imported.

    Raises:
        UsageError: the TPU cannot be used; the message names the obstacle and the alternatives.
    """
    obstacle = find_obstacle(options.tpu)
    if obstacle:
        raise UsageError(
            f"No TPU can be used: {obstacle}. {_alternative(options.tpu)} To check whether the "
            "experiment would run on a TPU: --mode=aot_compile."
        )


def build(devices: list[str], options: StrategyOptions) -> "tf.distribute.TPUStrategy":
    """Connects to a TPU, initializes it, which erases its memory, and builds the strategy.

    Args:
        devices: not used; the strategy detects its devices itself.
        options: `options.tpu` is a TPU of Google Cloud, by its name in the project and zone of this
            machine or as projects/PROJECT/locations/ZONE/nodes/NAME; or grpc://HOST:PORT of a TPU
            worker. "" for the TPU of this machine.

    Raises:
        UsageError: the TPU cannot be used; the message is one line.
    """
    name = options.tpu
    if name.startswith("grpc://"):
        _check_reachable(name)
    import tensorflow as tf

    is_resource = name.startswith("projects/")
    project, zone, short = name.split("/")[1::2] if is_resource else (None, None, name or "local")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=short, zone=zone, project=project
        )
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:
        # TensorFlow, gRPC, urllib and Google's client raise errors without a common base class.
        first_sentence = " ".join(str(error).partition(". ")[0].split())[:200]
        raise UsageError(
            f"The TPU {name or 'of this machine'} cannot be initialized "
            f"({type(error).__name__}: {first_sentence}). {_alternative(name)}"
        ) from error


def describe_topology(strategy: "tf.distribute.TPUStrategy") -> str:
    """Describes a TPU as far as its properties are known, such as "v5e, 4 cores, 1 host"."""
    is_local = not strategy.cluster_resolver.master()
    generation = " ".join(sorted(set(list_chips()))) if is_local else ""
    cores = count(strategy.num_replicas_in_sync, "core")
    hosts = count(strategy.extended.num_hosts, "host")
    return ", ".join(part for part in (generation, cores, hosts) if part)


def _check_reachable(address: str) -> None:
    # The first of several addresses, separated by commas, is the coordinator.
    host, _, port = address.removeprefix("grpc://").partition(",")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:  # OverflowError: the port is above 65535
        raise UsageError(
            f"The TPU {address} is not reachable ({getattr(error, 'strerror', None) or error}): fix "
            f"runtime.tpu. {_alternative(address)}"
        ) from None


def _alternative(address: str) -> str:
    keys = " and no runtime.tpu" if address else ""
    return f"To run without a TPU: --config.runtime.strategy=auto{keys}."


def _split_version(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or no PCI bus
        return ""
