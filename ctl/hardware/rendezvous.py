"""Waits for the other processes of a run to start, and exchanges addresses with them.

Anyone who reaches a port can send something: a message counts only if it has the signature of the job's
token, which is empty if the job has none, and nothing that is sent ends a process.
"""

from collections.abc import Iterator
import contextlib
import hmac
import json
import os
import select
import socket
import time
from typing import Any

from ctl.errors import Failure, UsageError, print_line
from ctl.hardware.cluster import ADDRESS, Cluster, task_name

# An environment variable, set by ctl.launch, which chooses free ports at each start.
PORTS_BY_LAUNCHER = "CTL_PORTS_BY_LAUNCHER"
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 5.0  # between two lines that name the missing processes
_LINGER_POLLS = 10  # polls for which this process still listens after it has reached all others
# What a client of HTTP/2 sends first (RFC 9113, section 3.4). The server answers with its own settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_MAX_LINE = 2**24  # bytes of a message between processes that meet
_LINE_SECONDS = 5.0  # for a process that has connected to send its line


def meet(cluster: Cluster, *, timeout: float, token: str = "") -> dict[str, str]:
    """Lets processes that know only their ranks exchange addresses.

    Each process chooses a free port. Rank 0 listens at the address that all know, collects the ports
    and the hosts from which the others connect, and sends the complete list to all.

    Args:
        cluster: the processes, with the address at which they meet.
        timeout: seconds to wait for the others.
        token: a secret of the job, with which messages are signed; "" if there is none.

    Returns:
        The environment variables that describe the cluster with its addresses.

    Raises:
        UsageError: the port of rank 0 is in use, or the processes belong to different runs.
        Failure: a process did not start within `timeout` seconds.
    """
    tasks = {role: range(len(ranks)) for role, ranks in cluster.addresses.items()}
    names = [task_name(role, i) for role in tasks for i in tasks[role]]  # in the order of the ranks
    exchange = _collect if cluster.name == names[0] else _join
    with socket.socket() as chosen:
        # It stays bound until all have chosen, or the system could assign the same port twice.
        chosen.bind(("", 0))
        line = {"name": cluster.name, "names": names, "port": chosen.getsockname()[1]}
        hint = " with the same CTL_TOKEN" if token else ""
        answers = iter(exchange(cluster, line, token, _Waiting(cluster.name, timeout, hint)))
    spec = {role: [next(answers) for _ in indices] for role, indices in tasks.items()}
    complete = Cluster(spec, cluster.role, cluster.index)
    return {"TF_CONFIG": complete.tf_config(), PORTS_BY_LAUNCHER: "1"}


class _Waiting:
    """Prints every few seconds whom a process waits for, and fails after the time limit."""

    def __init__(self, name: str, timeout: float, hint: str = ""):
        self._name, self._timeout, self._hint = name, timeout, hint
        self._start = self._last = time.monotonic()

    def check(self, missing: str) -> None:
        now = time.monotonic()
        if now - self._start > self._timeout:
            raise Failure(
                f"{self._name} waited {self._timeout:.0f} s for {missing}: start all "
                f"processes{self._hint}, or increase runtime.cluster.start_timeout."
            )
        if now - self._last >= _REPORT_SECONDS:
            self._last = now
            print_line(f"{self._name} waits for {missing}.")


def _collect(cluster: Cluster, line: dict[str, Any], token: str, clock: _Waiting) -> list[str]:
    """Returns the addresses of all processes, in rank 0, and sends them to the others."""
    host, port = _split(cluster.meeting)
    names = line["names"]
    found = {cluster.name: f"{host}:{line['port']}"}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen_at(port, cluster, cluster.meeting, "MASTER_PORT"))
        peers: dict[str, socket.socket] = {}

        def is_missing(name: str) -> bool:
            # A process that was killed while it waited has closed its connection, and is started
            # again. One that waits sends nothing more.
            closed = name in peers and _is_readable(peers[name], seconds=0)
            return name in names and (name not in found or closed)

        while missing := [name for name in names if is_missing(name)]:
            clock.check(f"{', '.join(missing)} at {cluster.meeting}")
            try:
                peer, (source, *_) = listener.accept()
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
                continue
            stack.enter_context(peer)
            message = _receive(peer, token)
            chosen = message.get("port")
            # Another program, another job, or a process that has ended or is very slow.
            if type(chosen) is not int or not 0 < chosen < 2**16:
                peer.close()  # a slow process connects again
                continue
            name = str(message.get("name"))
            if message.get("names") != names or not is_missing(name):
                with contextlib.suppress(OSError):
                    _send(peer, {"error": f"{cluster.name} waits for {', '.join(missing)}"}, token)
                continue
            # A process on the host of rank 0 may connect from an address that others cannot reach.
            is_local = source.startswith("127.")
            found[name] = f"{host if is_local else source}:{chosen}"
            peers[name] = peer
        addresses = [found[name] for name in names]
        for peer in peers.values():
            with contextlib.suppress(OSError):  # reported when its port is not reached
                _send(peer, {"addresses": addresses}, token)
    return addresses


def _join(cluster: Cluster, line: dict[str, Any], token: str, clock: _Waiting) -> list[str]:
    """Returns the addresses of all processes, in a process other than rank 0."""
    missing = f"{line['names'][0]} at {cluster.meeting}"
    while True:
        clock.check(missing)
        try:
            with socket.create_connection(_split(cluster.meeting), timeout=1.0) as peer:
                _send(peer, line, token)
                while not _is_readable(peer, seconds=1.0):
                    clock.check(f"the others, with {missing}")
                answer = _receive(peer, token)
        except OSError:
            answer = {}
        addresses, reason = answer.get("addresses"), answer.get("error")
        if isinstance(addresses, list) and len(addresses) == cluster.size:
            addresses = [str(each) for each in addresses]
            if all(map(ADDRESS.fullmatch, addresses)):
                return addresses
        if isinstance(reason, str):
            raise UsageError(
                f"{cluster.name} has met another run at {cluster.meeting}: {reason}, and "
                f"this is {cluster.name} of {cluster.size}. Choose another MASTER_PORT."
            )
        time.sleep(_POLL_SECONDS)


def _is_readable(peer: socket.socket, *, seconds: float) -> bool:
    """Returns whether the other process has sent something, or has closed the connection."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _send(peer: socket.socket, message: dict[str, Any], token: str) -> None:
    text = json.dumps(message).encode()
    peer.settimeout(_LINE_SECONDS)
    peer.sendall(_sign(text, token) + b" " + text + b"\n")


def _sign(text: bytes, token: str) -> bytes:
    return hmac.new(os.fsencode(token), text, "sha256").hexdigest().encode()


def _receive(peer: socket.socket, token: str) -> dict[str, Any]:
    """Returns what the other process sends; {} if it sends nothing valid in time."""
    end, line = time.monotonic() + _LINE_SECONDS, bytearray()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        while not line.endswith(b"\n") and len(line) <= _MAX_LINE:
            peer.settimeout(max(end - time.monotonic(), 1e-3))
            part = peer.recv(2**16)
            if not part:
                return {}
            line += part
        signature, _, text = bytes(line[:-1]).partition(b" ")
        if hmac.compare_digest(signature, _sign(text, token)):
            message = json.loads(text)
            return message if isinstance(message, dict) else {}
    return {}


def wait_for_others(cluster: Cluster, *, timeout: float, serving: bool = False) -> None:
    """Waits until every other process of the cluster listens at its address.

    TensorFlow waits too, but without a message. Meanwhile this process listens at its own address, so
    that the others can reach it; TensorFlow's server takes over the port afterwards.

    Args:
        cluster: the processes.
        timeout: seconds to wait.
        serving: whether to wait for the servers of TensorFlow. A connection to a process that still
            waits is reset when its server takes over the port; TensorFlow 2.19 aborts a coordinator
            then.

    Raises:
        UsageError: the port of this process is in use, or its host is not this machine.
        Failure: a process did not start within `timeout` seconds, or the port that ctl.launch has
            chosen is in use.
    """
    missing = cluster.others()
    clock = _Waiting(cluster.name, timeout)
    port = _split(cluster.address)[1]
    with _listen_at(port, cluster, cluster.address, "TF_CONFIG") as listener:
        while missing:
            missing = {n: a for n, a in missing.items() if not is_listening(a, serving=serving)}
            _close_pending(listener)
            if not missing:
                break
            clock.check(", ".join(f"{name} ({address})" for name, address in missing.items()))
            time.sleep(_POLL_SECONDS)
        # Another process may reach this one later than the reverse; until TensorFlow's server
        # listens, it would count this one as missing again. One that serves has reached all.
        for _ in range(0 if serving else _LINGER_POLLS):
            _close_pending(listener)
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Chooses ports of this machine that the system assigns to no other socket during the block.

    Servers that set SO_REUSEADDR, as TensorFlow's do, can listen at them: the sockets that hold the
    ports do not listen.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("localhost", 0))
        yield [each.getsockname()[1] for each in sockets]


def is_listening(address: str, *, serving: bool = False) -> bool:
    """Returns whether a process listens at host:port; if `serving`, whether a gRPC server answers."""
    try:
        with socket.create_connection(_split(address), timeout=1.0) as peer:
            if not serving:
                return True
            peer.sendall(_PREFACE)
            return bool(peer.recv(1))
    except OSError:
        return False


def _listen_at(port: int, cluster: Cluster, address: str, place: str) -> socket.socket:
    """Listens at a port of this host; errors name the process, its address and where it is set."""
    listener = socket.socket()
    # Without SO_REUSEADDR a restarted process could not bind while its old connections are in
    # TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((cluster.listens_on(), port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        # The launcher chooses ports that are free then: another program has taken this one since.
        kind = Failure if os.environ.get(PORTS_BY_LAUNCHER) else UsageError
        raise kind(
            f"{cluster.name} cannot listen at {address} ({error.strerror}): stop the program that uses "
            f"the port, or choose another port in {place}."
        ) from None
    listener.setblocking(False)
    return listener


def _close_pending(listener: socket.socket) -> None:
    """Closes the pending connections: their number must not reach the limit given to listen()."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:  # no connection is pending
            return


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
