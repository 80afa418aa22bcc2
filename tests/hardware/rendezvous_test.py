"""The processes of a run wait for each other."""

import socket
import threading
import time

import pytest

from ctl.errors import Failure, UsageError
from ctl.hardware import cluster, rendezvous


def make_clusters(workers):
    ports = rendezvous.find_free_ports(workers)
    return cluster.make_local_clusters(workers=workers, servers=0, ports=ports)


def wait(worker, results):
    try:
        rendezvous.wait_for_others(worker, timeout=60)
        results.append(worker.name)
    except (Failure, UsageError) as error:
        results.append(str(error))


def test_free_ports_differ():
    ports = rendezvous.find_free_ports(4)
    assert len(set(ports)) == 4
    assert not any(rendezvous.is_listening(f"localhost:{port}") for port in ports)


def test_all_processes_wait_for_a_late_one_and_print_its_name(monkeypatch):
    clusters = make_clusters(3)
    lines, results = [], []
    monkeypatch.setattr(rendezvous, "print_line", lines.append)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.2)
    threads = [threading.Thread(target=wait, args=(c, results)) for c in clusters]
    for thread in threads[:2]:
        thread.start()
    line = f"worker 0 waits for worker 2 ({clusters[2].address})."
    deadline = time.monotonic() + 30
    while line not in lines and time.monotonic() < deadline:
        time.sleep(0.05)
    assert line in lines
    assert results == []
    threads[2].start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(results) == ["worker 0", "worker 1", "worker 2"]


def test_waiting_ends_after_the_timeout():
    worker, _ = make_clusters(2)
    with pytest.raises(
        Failure,
        match=r"worker 0 waited 0 s for worker 1 \(localhost:\d+\): start all processes, or "
        r"increase runtime\.cluster\.start_timeout\.",
    ):
        rendezvous.wait_for_others(worker, timeout=0.3)


@pytest.mark.parametrize(
    ("variable", "kind"),
    [(None, UsageError), ("1", Failure)],
    ids=["chosen by the user", "chosen by the launcher"],
)
def test_a_port_in_use_is_reported(monkeypatch, variable, kind):
    if variable:
        monkeypatch.setenv(rendezvous.PORTS_BY_LAUNCHER, variable)
    worker, _ = make_clusters(2)
    with socket.socket() as other:
        other.bind(("", int(worker.address.rsplit(":")[-1])))
        other.listen()
        with pytest.raises(kind, match=r"worker 0 cannot listen at localhost:\d+ \(Address al"):
            rendezvous.wait_for_others(worker, timeout=1)
