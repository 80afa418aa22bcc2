"""The processes of a run wait for each other."""

import json
import queue
import socket
import threading
import time

import pytest

from ctl.errors import Failure, UsageError
from ctl.hardware import cluster, engines, rendezvous
from tests.support import child


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """The lines that are printed, in a queue; they are printed, and others are tried, more often."""
    printed = queue.Queue()
    monkeypatch.setattr(rendezvous, "print_line", printed.put)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.01)
    return printed


def wait_for_line(lines, line):
    while lines.get(timeout=30) != line:
        pass


def make_clusters(workers):
    ports = child.find_free_ports(workers)
    return cluster.make_local_clusters(workers=workers, servers=0, ports=ports)


def wait(worker, results, **arguments):
    try:
        rendezvous.wait_for_others(worker, timeout=60, **arguments)
        results.append(worker.name)
    except (Failure, UsageError) as error:
        results.append(str(error))


def test_reserved_ports_differ_and_are_free_for_a_server_and_taken_for_others():
    with rendezvous.reserve_ports(4) as ports, socket.socket() as other:
        assert len(set(ports)) == 4
        assert not any(rendezvous.is_listening(f"localhost:{port}") for port in ports)
        with pytest.raises(OSError, match="in use"):
            other.bind(("localhost", ports[0]))
        with socket.create_server(("", ports[0])):  # sets SO_REUSEADDR
            assert rendezvous.is_listening(f"localhost:{ports[0]}")


def test_all_processes_wait_for_a_late_one_and_print_its_name(lines):
    clusters, results = make_clusters(3), []
    threads = [threading.Thread(target=wait, args=(c, results)) for c in clusters]
    for thread in threads[:2]:
        thread.start()
    wait_for_line(lines, f"worker 0 waits for worker 2 ({clusters[2].address}).")
    assert results == []
    threads[2].start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(results) == ["worker 0", "worker 1", "worker 2"]


def test_waiting_ends_after_the_timeout():
    worker, _ = make_clusters(2)
    line = r"worker 0 waited 0 s for worker 1 \(localhost:\d+\): start all processes, or increase"
    with pytest.raises(Failure, match=line):
        rendezvous.wait_for_others(worker, timeout=0.1)


def test_a_coordinator_waits_for_a_server_that_answers():
    chief, worker = make_clusters(2)
    results = []
    thread = threading.Thread(target=wait, args=(chief, results), kwargs={"serving": True})
    with socket.create_server(("", int(worker.address.rsplit(":")[-1]))) as listener:
        listener.settimeout(30)
        thread.start()
        listener.accept()[0].close()  # as a process does that waits for the others, too
        server, _ = listener.accept()
        with server:
            assert not results
            server.sendall(b"\0")
            thread.join(30)
    assert results == [chief.name]


@pytest.mark.parametrize(("by_launcher", "kind"), [("", UsageError), ("1", Failure)])
def test_a_port_in_use_is_reported(monkeypatch, by_launcher, kind):
    monkeypatch.setenv(rendezvous.PORTS_BY_LAUNCHER, by_launcher)
    worker, _ = make_clusters(2)
    with socket.socket() as other:
        other.bind(("", int(worker.address.rsplit(":")[-1])))
        other.listen()
        with pytest.raises(kind, match=r"worker 0 .*localhost:\d+ \(Address"):
            rendezvous.wait_for_others(worker, timeout=1)


class Ranks:
    """Processes that know their ranks, each in a thread with an environment of its own."""

    def __init__(self, size, **variables):
        (self.port,) = child.find_free_ports(1)
        self.environments = [
            {"RANK": str(i), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
             "MASTER_PORT": str(self.port), **variables} for i in range(size)
        ]  # fmt: skip
        self.errors = {}
        self.threads = []

    def start(self, *ranks):
        for rank in ranks:
            self.threads.append(threading.Thread(target=self.meet, args=(rank,)))
            self.threads[-1].start()

    def finish(self):
        """Waits for all, which must have met."""
        for thread in self.threads:
            thread.join(timeout=60)
        assert not self.errors

    def meet(self, rank, timeout=60):
        try:
            engines.exchange_addresses(self.environments[rank], timeout=timeout)
        except (Failure, UsageError) as error:
            self.errors[rank] = error

    def connect(self):
        """Connects to rank 0, which must have printed that it waits."""
        return socket.create_connection(("localhost", self.port), timeout=30)


@pytest.mark.parametrize(("servers", "last"), [("0", "worker 2"), ("1", "ps 0")])
def test_processes_that_know_their_ranks_exchange_addresses(servers, last, lines):
    ranks = Ranks(3, CTL_PS=servers)
    ranks.start(0, 1)
    first = "chief" if servers == "1" else "worker 0"
    wait_for_line(lines, f"{first} waits for {last} at localhost:{ranks.port}.")
    with ranks.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
    with ranks.connect() as silent:
        silent.shutdown(socket.SHUT_WR)
        ranks.start(2)
        ranks.finish()
    clusters = [engines.from_environment(e) for e in ranks.environments]
    assert [clusters[0].name, clusters[2].name] == [first, last]
    assert len({json.dumps(c.spec()) for c in clusters}) == 1
    assert len({c.address for c in clusters}) == 3 and not any(c.meeting for c in clusters)


def test_process_that_is_paused_before_it_sends_its_line_connects_again(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LINE_SECONDS", 0.1)
    send, pauses = rendezvous._send, [0.5]

    def send_late(peer, message, token):
        if pauses:
            time.sleep(pauses.pop())
        send(peer, message, token)

    monkeypatch.setattr(rendezvous, "_send", send_late)
    ranks = Ranks(2)
    ranks.start(0, 1)
    ranks.finish()
    assert all("TF_CONFIG" in environment for environment in ranks.environments)


@pytest.mark.parametrize(("rank", "missing"), [(0, "worker 1 at"), (1, "worker 0 at")])
def test_process_that_meets_nobody_names_who_is_missing(rank, missing):
    ranks = Ranks(2)
    ranks.meet(rank, timeout=0.1)
    message = f"worker {rank} waited 0 s for {missing} localhost:{ranks.port}: start all processes"
    assert isinstance(ranks.errors[rank], Failure) and message in str(ranks.errors[rank])


def test_processes_of_another_run_are_rejected():
    ranks, other = Ranks(2), Ranks(3)
    ranks.start(0)
    for environment in other.environments:
        environment["MASTER_PORT"] = str(ranks.port)
    other.meet(1)
    assert isinstance(other.errors[1], UsageError)
    assert "worker 1 has met another run" in str(other.errors[1])
    ranks.start(1)
    ranks.finish()


def test_process_that_was_killed_while_it_waited_meets_the_others_when_it_is_started_again(lines):
    ranks = Ranks(3)
    ranks.start(0)
    wait_for_line(lines, f"worker 0 waits for worker 1, worker 2 at localhost:{ranks.port}.")
    line = {"name": "worker 1", "names": [f"worker {i}" for i in range(3)], "port": 1}
    with ranks.connect() as killed:
        rendezvous._send(killed, line, "")
    ranks.start(2)
    ranks.threads[0].join(timeout=0.2)  # all have connected, but one of them has been killed
    assert ranks.threads[0].is_alive()
    ranks.start(1)
    ranks.finish()
    specs = [json.loads(environment["TF_CONFIG"])["cluster"] for environment in ranks.environments]
    assert specs[0] == specs[1] == specs[2] and not specs[0]["worker"][1].endswith(":1")


def signed(content, token=""):
    """A line as a process of a job with this token sends it, also one that is no JSON."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return rendezvous._sign(text, token) + b" " + text + b"\n"


WORKER = {"name": "worker 1", "names": ["worker 0", "worker 1"], "port": 1}
STRANGE = [
    b"\xff\n",
    b"[" * 100_000 + b"\n",
    signed(b"[" * 100_000),
    signed([]),
    signed({key: WORKER[key] for key in ("name", "names")}),
    signed(WORKER | {"port": "x:1,evil"}),
    signed(WORKER | {"port": True}),
    signed(WORKER | {"port": 2**16}),
    signed(WORKER | {"name": ["worker 1"]}),
    json.dumps(WORKER).encode() + b"\n",
]


@pytest.mark.parametrize("token", ["", "secret"])
def test_nothing_that_a_stranger_sends_to_rank_0_ends_the_start(token, lines):
    ranks = Ranks(2, CTL_TOKEN=token)
    ranks.start(0)
    wait_for_line(lines, f"worker 0 waits for worker 1 at localhost:{ranks.port}.")
    # Without a token, whoever knows the form of a line is worker 1.
    for line in [*STRANGE, *([signed(WORKER), signed(WORKER, "other")] if token else [])]:
        with ranks.connect() as stranger:
            stranger.sendall(line)
            stranger.settimeout(30)
            assert rendezvous._receive(stranger, token).keys() <= {"error"}
    ranks.start(1)
    ranks.finish()


def test_who_sends_byte_by_byte_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LINE_SECONDS", 0.2)
    one, other = socket.socketpair()
    ended = threading.Event()

    def send():
        while not ended.wait(0.05):
            other.send(b"x")

    thread = threading.Thread(target=send)
    thread.start()
    assert rendezvous._receive(one, "") == {}
    ended.set()
    thread.join()


def test_answer_that_is_not_of_rank_0_is_not_used():
    ranks, one = Ranks(2), "localhost:1"
    thread = threading.Thread(target=ranks.meet, args=(1, 0.5))
    with socket.create_server(("localhost", ranks.port)) as server:
        thread.start()
        for addresses in ([one], [one, "localhost"], [one, 2], one, {one: 1, "b:1": 2}):
            peer, _ = server.accept()
            with peer:
                rendezvous._send(peer, {"addresses": addresses, "error": [one]}, "")
    thread.join(60)
    assert "worker 1 waited 0 s" in str(ranks.errors[1])


def test_processes_with_different_tokens_do_not_meet():
    ranks = Ranks(2, CTL_TOKEN="a")
    ranks.environments[1]["CTL_TOKEN"] = "b"
    thread = threading.Thread(target=ranks.meet, args=(0, 1))
    thread.start()
    ranks.meet(1, timeout=1)
    thread.join(60)
    for error in ranks.errors.values():
        assert "start all processes with the same CTL_TOKEN, or increase" in str(error)
    assert len(ranks.errors) == 2


def test_token_of_open_mpi_is_used(monkeypatch):
    seen = []
    monkeypatch.setattr(rendezvous, "meet", lambda *_, token, timeout: seen.append(token) or {})
    mpi = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in {"SIZE": "2", "RANK": "0", "LOCAL_SIZE": "2"}.items()
    }
    mpi["OMPI_MCA_orte_precondition_transports"] = "of-mpi"
    torch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    torch["OMPI_MCA_orte_precondition_transports"] = "of-mpi"
    for environment in (mpi, mpi | {"CTL_TOKEN": "mine"}, torch):
        engines.exchange_addresses(environment, timeout=1)
    assert seen == ["of-mpi", "mine", ""]


@pytest.mark.parametrize(
    ("addresses", "meeting", "host"),
    [
        ({"worker": ["localhost:1", "127.0.0.1:2"]}, "", "localhost"),
        ({"worker": ["localhost:1", "b:2"]}, "", ""),
        ({"worker": ["rank-0:1", "rank-1:1"]}, "localhost:1", "localhost"),
        ({"worker": ["rank-0:1", "rank-1:1"]}, "a:1", ""),
    ],
)
def test_processes_of_one_host_listen_on_the_loopback_interface(addresses, meeting, host):
    one = cluster.Cluster(addresses, "worker", 0, meeting)
    assert one.listens_on() == host
    (port,) = child.find_free_ports(1)
    with rendezvous._listen_at(port, one, "", "") as listener:
        assert listener.getsockname()[0] == ("127.0.0.1" if host else "0.0.0.0")


def test_meeting_port_in_use_is_reported():
    ranks = Ranks(2)
    with socket.create_server(("", ranks.port)):
        ranks.meet(0)
    assert "or choose another port in MASTER_PORT" in str(ranks.errors[0])


@pytest.mark.parametrize("environment", [{}, {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"}])
def test_processes_that_know_their_addresses_do_not_meet(environment):
    before = dict(environment)
    engines.exchange_addresses(environment, timeout=0)
    assert environment == before
