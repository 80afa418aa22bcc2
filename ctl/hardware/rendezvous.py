"""Waits for the other processes of a run to start."""

import os
import socket
import time

from ctl.errors import Failure, UsageError, print_line
from ctl.hardware.cluster import Cluster

# An environment variable, set by ctl.launch, which chooses free ports at each start.
PORTS_BY_LAUNCHER = "CTL_PORTS_BY_LAUNCHER"
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 5.0  # between two lines that name the missing processes
_LINGER_POLLS = 10  # polls for which this process still listens after it has reached all others


def wait_for_others(cluster: Cluster, *, timeout: float) -> None:
    """Waits until every other process of the cluster listens at its address.

    TensorFlow waits too, but without a message. Meanwhile this process listens at its own address, so
    that the others can reach it; TensorFlow's server takes over the port afterwards.

    Args:
        cluster: the processes.
        timeout: seconds to wait.

    Raises:
        UsageError: the port of this process is in use, or its host is not this machine.
        Failure: a process did not start within `timeout` seconds, or the port that ctl.launch has
            chosen is in use.
    """
    missing = cluster.others()
    start = last_report = time.monotonic()
    with _listen(cluster) as listener:
        while missing:
            missing = {n: a for n, a in missing.items() if not is_listening(a)}
            _close_pending(listener)
            if not missing:
                break
            now = time.monotonic()
            names = ", ".join(f"{name} ({address})" for name, address in missing.items())
            if now - start > timeout:
                raise Failure(
                    f"{cluster.name} waited {timeout:.0f} s for {names}: start all processes, or "
                    "increase runtime.cluster.start_timeout."
                )
            if now - last_report >= _REPORT_SECONDS:
                last_report = now
                print_line(f"{cluster.name} waits for {names}.")
            time.sleep(_POLL_SECONDS)
        # Another process may reach this one later than the reverse; until TensorFlow's server
        # listens, it would count this one as missing again.
        for _ in range(_LINGER_POLLS):
            _close_pending(listener)
            time.sleep(_POLL_SECONDS)


def find_free_ports(count: int) -> list[int]:
    """Returns ports of this machine at which no process listens at present."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        # All stay bound until the last is, or the system could assign the same port twice.
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_listening(address: str) -> bool:
    """Returns whether a process listens at host:port."""
    try:
        socket.create_connection(_split(address), timeout=1.0).close()
    except OSError:
        return False
    return True


def _listen(cluster: Cluster) -> socket.socket:
    host, port = _split(cluster.address)
    listener = socket.socket()
    # Without SO_REUSEADDR a restarted process could not bind while its old connections are in
    # TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        # The launcher chooses ports that are free then: another program has taken this one since.
        kind = Failure if os.environ.get(PORTS_BY_LAUNCHER) else UsageError
        raise kind(
            f"{cluster.name} cannot listen at {host}:{port} ({error.strerror}): stop the program that "
            "uses the port, or choose another port in TF_CONFIG."
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
