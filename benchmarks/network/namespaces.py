"""Several hosts on one machine: Linux network namespaces on a bridge, with limited links.

    with Hosts(2) as hosts:
        processes = hosts.start([sys.executable, "-m", "ctl.main", "--config=...", "--workdir=..."])
        hosts.limit(10)      # Mbit/s of all links, while the processes run
        hosts.cut(1)         # host 1 loses its network without noticing
        hosts.reconnect(1)
        sent = hosts.sent_bytes()

Each host has the address 10.77.0.1, 10.77.0.2, ... and sees the disk of the machine. The limit is a
token bucket (`tc ... tbf`) on both ends of each link: on the host's interface for what it sends, and on
the port of the bridge for what it receives. No latency is added, because this requires `netem`, which
many kernels do not have. The module requires Linux, root and iproute2.
"""

from collections.abc import Mapping, Sequence
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess

from ctl.hardware.cluster import Cluster

PORT = 2222  # of the worker on each host, as in TF_CONFIG
QUEUE_MS = 50  # packets that would wait longer for tokens are dropped, as in a switch
INTERFACE = "eth0"  # the only one of each host, in addition to `lo`
# A bucket holds the bytes of 1 ms, but at least this number. A large bucket would send the first part of
# every all-reduce at the speed of memory, and a small one takes one timer per packet.
MIN_BURST = 16_000
_NAME = re.compile(r"ctl(\d+)-\d+-(?:hub|\d+)")
_FILES = pathlib.Path("/etc/netns")
_NUMBERS = itertools.count()  # of the `Hosts` of this process


class Unavailable(Exception):
    """This machine cannot create network namespaces."""


class Hosts(contextlib.AbstractContextManager):
    """Creates hosts on entry; on exit, kills their processes and removes the hosts.

    Args:
        count: the number of hosts.
        hostnames: a host name of each host, maybe with a domain, which all hosts resolve.

    Attributes:
        names: the network namespaces, for `ip netns exec NAME`.
        addresses: the IPv4 address of each host.
    """

    def __init__(self, count: int, *, hostnames: Sequence[str] = ()):
        # Unique, because the names are global to the machine.
        prefix = f"ctl{os.getpid()}-{next(_NUMBERS)}"
        self.names = [f"{prefix}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self._hub, self._hostnames = f"{prefix}-hub", hostnames
        self._created: list[str] = []
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        """Creates the hosts.

        Raises:
            Unavailable: the machine has no network namespaces, or this user may not create them.
        """
        try:
            remove_abandoned()
            self._create()
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            raise Unavailable(str(getattr(error, "stderr", None) or error).strip()) from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *unused) -> None:
        self._remove()

    def popen(self, host: int, command: Sequence[str], **kwargs) -> subprocess.Popen:
        """Starts a process on a host; `kwargs` are those of `subprocess.Popen`."""
        process = subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], **kwargs)
        self._processes.append(process)
        return process

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] = os.environ, **kwargs
    ) -> list[subprocess.Popen]:
        """Starts the same command on every host, as the workers of one cluster.

        Args:
            command: the program and its arguments.
            environment: variables of the processes; TF_CONFIG is added.
            **kwargs: of `subprocess.Popen`.

        Returns:
            The process of each host. Its `pid` is the one of the command itself.
        """
        return [
            self.popen(i, command, env={**environment, "TF_CONFIG": self.tf_config(i)}, **kwargs)
            for i in range(len(self.names))
        ]

    def tf_config(self, host: int) -> str:
        """Returns the TF_CONFIG of the worker on a host."""
        addresses = {"worker": [f"{address}:{PORT}" for address in self.addresses]}
        return Cluster(addresses, "worker", host).tf_config()

    def limit(self, rate: float | None) -> None:
        """Sets the Mbit/s of all links in each direction; None removes the limit.

        Processes may be running.
        """
        for i, name in enumerate(self.names):
            _limit(name, INTERFACE, rate)
            _limit(self._hub, f"port{i}", rate)

    def cut(self, host: int) -> None:
        """Disconnects a host: its packets get lost, and its interface stays up.

        A failed switch has the same effect. A process gets no error before its own timeout, because
        nothing reports that the other host cannot be reached.
        """
        ip(f"-n {self._hub} link set port{host} nomaster")

    def reconnect(self, host: int) -> None:
        """Connects a host that was cut off."""
        ip(f"-n {self._hub} link set port{host} master bridge")

    def sent_bytes(self) -> list[int]:
        """Returns the bytes that each host has sent since it exists, Ethernet headers included."""
        links = (ip(f"-n {name} -s -j link show {INTERFACE}") for name in self.names)
        return [json.loads(link)[0]["stats64"]["tx"]["bytes"] for link in links]

    def _create(self) -> None:
        for name in (self._hub, *self.names):
            ip(f"netns add {name}")
            self._created.append(name)
            ip(f"-n {name} link set lo up")
        ip(f"-n {self._hub} link add bridge type bridge")
        ip(f"-n {self._hub} link set bridge up")
        for i, name in enumerate(self.names):
            ip(f"-n {self._hub} link add port{i} type veth peer {INTERFACE} netns {name}")
            ip(f"-n {self._hub} link set port{i} master bridge up")
            ip(f"-n {name} addr add {self.addresses[i]}/24 dev {INTERFACE}")
            ip(f"-n {name} link set {INTERFACE} up")
            self._write_hosts_file(name)

    def _write_hosts_file(self, name: str) -> None:
        if self._hostnames:
            lines = map(" ".join, zip(self.addresses, self._hostnames, strict=True))
            folder = _FILES / name  # `ip netns exec` mounts the files in it over those in /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _remove(self) -> None:
        for name in reversed(self._created):
            _remove_namespace(name)
        self._created.clear()
        for process in self._processes:
            process.kill()  # in case it has not entered its namespace yet
            process.wait()
        self._processes.clear()


def remove_abandoned() -> None:
    """Removes the hosts of processes that ended without removing them, for example by SIGKILL."""
    for line in run(["ip", "netns", "list"]).splitlines():
        match = _NAME.fullmatch(line.split()[0])
        if match and not pathlib.Path(f"/proc/{match[1]}").exists():
            _remove_namespace(match[0])


def ip(command: str) -> str:
    """Runs `ip` with arguments; returns its output."""
    return run(["ip", *command.split()])


def run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove_namespace(name: str) -> None:
    # A namespace without a name exists as long as its processes do.
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for pid in map(int, pids.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(_FILES / name, ignore_errors=True)
    # Another process may have removed it as abandoned.
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    tc = ["tc", "-n", namespace, "qdisc"]
    if rate is None:
        # `del` fails without a limit.
        subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
        return
    bits = round(rate * 1e6)
    burst = max(MIN_BURST, bits // 8 // 1000)
    bucket = ["rate", f"{bits}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
    run([*tc, "replace", "dev", device, "root", "tbf", *bucket])
