"""A TPU: whether this install can use one here, and the strategy over it.

Importing this loads no TensorFlow, whose own answer would come late: its resolver "finds" a local TPU
on any machine, and a build that does not fit aborts or hangs while it is imported.
"""

from collections.abc import MutableMapping
import importlib.metadata
import os
import pathlib
import re
import socket
from typing import TYPE_CHECKING, Any
import weakref

from ctl.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

BUS = pathlib.Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # also the vendor of the network card and the disks of Google's machines
_GENERATIONS = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
_NEWEST_LIBTPU = "0.0.30"  # with a newer one `import tensorflow` aborts the process
_PATIENCE = 5.0  # seconds for an address to answer; TensorFlow would wait for minutes
_REHEARSAL = "To see whether it would run on one: --mode=aot_compile."
_topologies: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def chips(bus: pathlib.Path = BUS) -> list[str]:
    """The generation of each TPU chip of this machine.

    Args:
        bus: where the kernel lists the devices of the PCI bus.
    """
    found = []
    for device in sorted(bus.glob("*")):
        if _read(device / "vendor") == _GOOGLE:
            found.append(_GENERATIONS.get(_read(device / "device"), ""))
    return [generation for generation in found if generation]


def skip_metadata_server(
    environment: MutableMapping[str, str] = os.environ, bus: pathlib.Path = BUS
) -> None:
    """Keeps `import tensorflow` from waiting minutes for a TPU's metadata server that is not there.

    Args:
        environment: the variables of this process; one that is set is left as it is.
        bus: where the kernel lists the devices of the PCI bus.
    """
    if not chips(bus):
        environment.setdefault("TPU_SKIP_MDS_QUERY", "1")


def missing(address: str = "", *, bus: pathlib.Path = BUS) -> str | None:
    """What this machine lacks to use a TPU, without loading TensorFlow.

    Args:
        address: a TPU's name or address; "" for a TPU of this machine.
        bus: where the kernel lists the devices of the PCI bus.

    Returns:
        What is missing, or None.
    """
    if _installed("tensorflow-tpu") is None:
        return "tensorflow-tpu is not installed, which BUILD.md tells how to"
    libtpu = _installed("libtpu")
    if libtpu is None:
        return "libtpu is not installed, which comes with ctl's extra `tpu`"
    if _numbers(libtpu) > _numbers(_NEWEST_LIBTPU):
        return f"libtpu is {libtpu}, and TensorFlow aborts with one after {_NEWEST_LIBTPU}"
    if not address and not chips(bus):
        return "no TPU chip is on this machine's PCI bus"
    return None


def check(address: str = "", *, bus: pathlib.Path = BUS) -> None:
    """Refuses a TPU that cannot be used, before TensorFlow is imported.

    Args:
        address: a TPU's name or address; "" for a TPU of this machine.
        bus: where the kernel lists the devices of the PCI bus.

    Raises:
        UsageError: says what is missing, and what to run instead.
    """
    lack = missing(address, bus=bus)
    if lack:
        raise UsageError(f"There is no TPU to use: {lack}. {_instead(address)} {_REHEARSAL}")


def build(
    name: str = "", zone: str = "", project: str = "", address: str = ""
) -> "tf.distribute.TPUStrategy":
    """Connects to a TPU, initializes it, which clears its memory, and makes the strategy.

    Args:
        name: of a TPU of Google Cloud; "" for that of `address`, or of this machine.
        zone: where the named TPU is; "" for that of this machine.
        project: whose the named TPU is; "" for that of this machine.
        address: grpc://HOST:PORT of a TPU's worker.

    Raises:
        UsageError: it cannot be had; one line says why.
    """
    check(address or name)
    if address:
        _check_answers(address)
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=address or name or "local", zone=zone or None, project=project or None
        )
        tf.config.experimental_connect_to_cluster(resolver)
        topology_ = tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (
        Exception
    ) as error:  # of TensorFlow, gRPC, urllib and Google's client, without a common base
        where = address or name or "of this machine"
        told = f"{type(error).__name__}: {' '.join(str(error).partition('. ')[0].split())[:200]}"
        raise UsageError(
            f"The TPU {where} cannot be initialized ({told}). {_instead(address or name)}"
        ) from error
    _topologies[strategy] = topology_
    return strategy


def topology(strategy: "tf.distribute.TPUStrategy", *, bus: pathlib.Path = BUS) -> str:
    """What a TPU is, in a few words: "v5e 2x2, 4 cores, 1 host", as far as it is known.

    Args:
        strategy: what `build` returned, or another's.
        bus: where the kernel lists the devices of the PCI bus.
    """
    local = not strategy.cluster_resolver.master()
    generation = " ".join(sorted(set(chips(bus)))) if local else ""
    built = _topologies.get(strategy)
    kind = " ".join(word for word in (generation, _mesh(built.mesh_shape) if built else "") if word)
    counts = [
        _count(strategy.num_replicas_in_sync, "core"),
        _count(strategy.extended.num_hosts, "host"),
    ]
    return ", ".join([kind, *counts] if kind else counts)


def _mesh(shape: Any) -> str:
    """The chips of a mesh of [x, y, z, cores of a chip], a flat one as x times y."""
    x, y, *rest = (int(n) for n in shape)
    deep = rest[:1] if rest and rest[0] > 1 else []
    return "x".join(str(n) for n in (x, y, *deep))


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _check_answers(address: str) -> None:
    host, _, port = address.removeprefix("grpc://").partition(",")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The TPU {address} does not answer ({told}): mend "
            f"runtime.tpu.address. {_instead(address)}"
        ) from None


def _instead(address: str) -> str:
    keys = " and no runtime.tpu keys" if address else ""
    return f"To run without a TPU: --config.runtime.strategy=auto{keys}."


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
