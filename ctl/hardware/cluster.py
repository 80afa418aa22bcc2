"""Which processes make a run, and which of them this one is: TF_CONFIG, read, checked and built.

Importing this loads no TensorFlow.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
import socket
import time
from typing import Any

from ctl.errors import Failure, UsageError

ROLES = ("chief", "worker", "ps", "evaluator")
_POLL = 0.1  # seconds between two looks for the other processes
_LINGER = 10  # looks that this process can be found by once it has found the others
_MOST = 100_000  # processes, as an Indexed Job has at most
_HOST = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(\[[0-9a-fA-F:]+\]|{_HOST}):(\d{{1,5}})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, and this one's place among them.

    Attributes:
        addresses: role -> the host:port of each task, in order.
        role: this process': "chief", "worker" or "ps".
        index: its number within the role.
    """

    addresses: Mapping[str, Sequence[str]]
    role: str
    index: int

    @property
    def address(self) -> str:
        """This process' own host:port."""
        return self.addresses[self.role][self.index]

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""
        return bool(self.addresses.get("ps"))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what a run writes once."""
        if "chief" in self.addresses:
            return self.role == "chief"
        return self.role == "worker" and self.index == 0

    @property
    def name(self) -> str:
        """This process, as messages call it, such as "worker 1"."""
        return task_name(self.role, self.index)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return sum(len(tasks) for tasks in self.addresses.values())

    def others(self) -> dict[str, str]:
        """Name -> address of all other processes."""
        return {
            task_name(role, i): address
            for role, tasks in self.addresses.items()
            for i, address in enumerate(tasks)
            if (role, i) != (self.role, self.index)
        }

    def tf_config(self) -> str:
        """The cluster as TensorFlow reads it from the environment variable TF_CONFIG."""
        spec = {role: list(tasks) for role, tasks in self.addresses.items()}
        return json.dumps({"cluster": spec, "task": {"type": self.role, "index": self.index}})


def task_name(role: str, index: int) -> str:
    """A process as messages call it."""
    return "chief" if role == "chief" else f"{role} {index}"


def read(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment describes, or None where it describes none.

    Args:
        environment: of the process. TF_CONFIG is read first; without it the variables of an
            Indexed Job of Kubernetes, as deploy/kubernetes sets them: JOB_COMPLETION_INDEX, CTL_JOB,
            CTL_SERVICE, CTL_WORKERS, CTL_PS, CTL_PORT.

    Raises:
        UsageError: the description is wrong.
    """
    if environment.get("TF_CONFIG", "").strip():
        return parse(environment["TF_CONFIG"])
    if environment.get("CTL_WORKERS", "").strip():
        return _of_indexed_job(environment)
    return None


def parse(text: str) -> Cluster | None:
    """Reads and checks the text of TF_CONFIG.

    Returns:
        The cluster; None where the text names no other process, as some platforms set it.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"is not JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
        raise _wrong("is not an object with an object 'cluster' in it")
    if not config.get("cluster"):
        return None
    addresses = {role: _tasks(role, tasks) for role, tasks in config["cluster"].items()}
    _check_addresses(addresses)
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise _wrong("does not say which task this process is ('task' with 'type' and 'index')")
    role, index = task["type"], _index(task["index"])
    if not isinstance(role, str) or role not in addresses:
        raise _wrong(f"says that this task is a {role!r}, and the cluster has {_listed(addresses)}")
    if not 0 <= index < len(addresses[role]):
        raise _wrong(
            f"says that this is task {index} of {role!r}, and there are {len(addresses[role])}, "
            "numbered from 0"
        )
    return Cluster(addresses, role, index)


def local(*, workers: int, servers: int, ports: Sequence[int]) -> list[Cluster]:
    """The places of all processes of a run on this machine.

    Args:
        workers: how many workers; without parameter servers worker 0 is the chief.
        servers: how many parameter servers. With some there is a chief of its own.
        ports: a free one for each process.
    """
    roles = (["chief"] if servers else []) + ["worker"] * workers + ["ps"] * servers
    addresses: dict[str, list[str]] = {}
    places = []
    for role, port in zip(roles, ports, strict=True):
        tasks = addresses.setdefault(role, [])
        places.append((role, len(tasks)))
        tasks.append(f"localhost:{port}")
    return [Cluster(addresses, role, index) for role, index in places]


def wait_for_others(
    cluster: Cluster,
    *,
    limit: float,
    print_line: Callable[[str], None],
    every: float = 5.0,
) -> None:
    """Waits until every other process of the cluster listens at its address.

    TensorFlow's own wait is silent. This process listens at its own address meanwhile, so that the
    others find it; TensorFlow takes the port over.

    Args:
        cluster: the processes.
        limit: seconds to wait.
        print_line: prints a line.
        every: seconds between two lines.

    Raises:
        UsageError: this process' own port is in use, or its host is not this machine.
        Failure: a process did not come in time.
    """
    missing = cluster.others()
    start = told = time.monotonic()
    with _listening(cluster) as listener:
        while missing:
            missing = {n: a for n, a in missing.items() if not listens(a)}
            _turn_away(listener)
            now = time.monotonic()
            names = ", ".join(f"{name} ({address})" for name, address in missing.items())
            if missing and now - start > limit:
                raise Failure(
                    f"{cluster.name} waited {limit:.0f} s for {names}: start all processes, or set "
                    "runtime.cluster.start_timeout to more seconds."
                )
            if missing and now - told >= every:
                told = now
                print_line(f"{cluster.name} waits for {names}.")
            if missing:
                time.sleep(_POLL)
        for _ in range(_LINGER):  # until all others have looked here too
            _turn_away(listener)
            time.sleep(_POLL)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _listening(cluster: Cluster) -> socket.socket:
    host, port = _split(cluster.address)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{cluster.name} cannot listen at {host}:{port} ({error.strerror}): stop what uses the "
            "port, or name another one in TF_CONFIG."
        ) from None
    listener.setblocking(False)
    return listener


def _turn_away(listener: socket.socket) -> None:
    """Closes what has connected, which knows by then that this process is there."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def listens(address: str) -> bool:
    """Whether a process listens at host:port."""
    try:
        socket.create_connection(_split(address), timeout=1.0).close()
    except OSError:
        return False
    return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _of_indexed_job(environment: Mapping[str, str]) -> Cluster:
    workers = _number(environment, "CTL_WORKERS", least=1, most=_MOST)
    servers = _number(environment, "CTL_PS", least=0, most=_MOST, default=0)
    port = _number(environment, "CTL_PORT", least=1, most=2**16 - 1, default=2222)
    index = _number(environment, "JOB_COMPLETION_INDEX", least=0, most=2 * _MOST)
    for name in ("CTL_JOB", "CTL_SERVICE"):
        if not environment.get(name, "").strip():
            raise UsageError(f"CTL_WORKERS is set and {name} is not: set it in the Job's manifest.")
    job, service = environment["CTL_JOB"].strip(), environment["CTL_SERVICE"].strip()
    if not _ADDRESS.fullmatch(f"{job}-{index}.{service}:{port}"):
        raise UsageError(
            f"CTL_JOB is {job!r} and CTL_SERVICE is {service!r}, which make no host's name: set them "
            "to the names of the Job and of its Service."
        )
    roles = (["chief"] if servers else []) + ["worker"] * workers + ["ps"] * servers
    if index >= len(roles):
        raise UsageError(
            f"JOB_COMPLETION_INDEX is {index}, and CTL_WORKERS and CTL_PS make {len(roles)} "
            "processes: set the Job's completions to that."
        )
    addresses: dict[str, list[str]] = {}
    for i, role in enumerate(roles):
        addresses.setdefault(role, []).append(f"{job}-{i}.{service}:{port}")
    return Cluster(addresses, roles[index], roles[:index].count(roles[index]))


def _number(
    environment: Mapping[str, str], name: str, *, least: int, most: int, default: int | None = None
) -> int:
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise UsageError(f"{name} is {text!r}, want a whole number, {least} to {most}.")
    return int(text)


def _tasks(role: str, tasks: Any) -> list[str]:
    if role not in ROLES:
        raise _wrong(f"has the role {role!r}: want {', '.join(ROLES)}")
    if isinstance(tasks, dict):  # TensorFlow's sparse form, {"0": "host:port"}
        raise _wrong(f"numbers the tasks of {role!r} by keys: give a list of host:port")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _wrong(f"has no list of host:port for {role!r}")
    for task in tasks:
        found = _ADDRESS.fullmatch(task)
        if not found or not 0 < int(found[2]) < 2**16:
            raise _wrong(f"has {task!r} for {role!r}: want host:port")
    return tasks


def _check_addresses(addresses: Mapping[str, Sequence[str]]) -> None:
    everyone = collections.Counter(a for tasks in addresses.values() for a in tasks)
    twice = sorted(address for address, count in everyone.items() if count > 1)
    if twice:
        raise _wrong(f"gives {twice[0]} to more than one task")
    if "evaluator" in addresses:
        raise _wrong("has an evaluator: leave it out, and run --mode=continuous_eval by its side")
    if len(addresses.get("chief", [])) > 1:
        raise _wrong("has more than one chief")
    if addresses.get("ps") and not (addresses.get("chief") and addresses.get("worker")):
        raise _wrong("has parameter servers: it needs a chief and workers too")


def _index(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch("-?[0-9]{1,18}", text):
        raise _wrong(f"has {value!r} for the task's index: want a whole number")
    return int(text)


def _listed(addresses: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{len(tasks)} {role}" for role, tasks in addresses.items())


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"TF_CONFIG {what}: mend it, or start the processes by python -m ctl.launch, which sets it."
    )
