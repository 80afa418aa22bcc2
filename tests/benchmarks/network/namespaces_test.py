"""Simulated hosts: the rate of their links, their counters, a cut, and that they disappear."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable, ip
from tests.support import child

# What Ethernet, IPv4 and TCP with timestamps add to the 1,448 bytes of data in a full packet.
WIRE = 1514 / 1448

RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    size, start = len(connection.recv(1)), time.perf_counter()
    while data := connection.recv(1 << 20):
        size += len(data)
    print(size, time.perf_counter() - start, flush=True)
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 5001)).sendall(bytes(int(sys.argv[2])))
"""
INTERRUPTED = """
import signal, subprocess, sys, time
from benchmarks.network.namespaces import Hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
with Hosts(2, rate=10) as hosts:
    hosts.popen(0, ["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(hosts.names[0], flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def hosts(namespaces):
    with Hosts(2, rate=100) as hosts:
        yield hosts


def send(hosts, size, **kwargs):
    return hosts.popen(0, [child.PYTHON, "-c", SEND, hosts.addresses[1], str(size)], **kwargs)


def mbits_on_the_wire(receiver, size):
    received, seconds = map(float, receiver.stdout.readline().split())
    assert received == size
    return received * WIRE * 8 / seconds / 1e6


@pytest.mark.slow
@pytest.mark.long  # it measures rates
def test_links_have_their_rate_counters_and_cuts(hosts):
    receiver = hosts.popen(1, [child.PYTHON, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    receiver.stdout.readline()
    before = hosts.traffic()
    size = 12_500_000
    assert send(hosts, size).wait() == 0
    # Other programs that use the CPU may slow a transfer down, and none makes it faster.
    rates = [mbits_on_the_wire(receiver, size)]
    for _ in range(2):
        send(hosts, size).wait()
        rates.append(mbits_on_the_wire(receiver, size))
    assert 50 < max(rates) < 115
    sender, receiving = (
        (after.sent - was.sent, after.received - was.received)
        for after, was in zip(hosts.traffic(), before, strict=True)
    )
    assert sender[0] == pytest.approx(3 * size * WIRE, rel=0.06)
    assert receiving[1] == pytest.approx(sender[0], rel=0.01)
    assert receiving[0] == pytest.approx(sender[1], rel=0.01) and sender[1] < 0.05 * sender[0]

    hosts.limit(20)
    send(hosts, 2_500_000).wait()
    assert 10 < mbits_on_the_wire(receiver, 2_500_000) < 23

    hosts.cut(1)
    waiting = send(hosts, 1000)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=1)
    hosts.reconnect(1)
    assert waiting.wait(timeout=30) == 0  # TCP repeats what was lost


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_hosts_and_their_processes_disappear_with_their_creator(hosts, number):
    creator = child.start(["-c", INTERRUPTED])
    name = creator.stdout.readline().strip()
    assert name in ip("netns list")
    # `ip netns exec` enters the namespace shortly after it has started.
    sleeping = wait_for(lambda: ip(f"netns pids {name}").split())
    (sleeping,) = sleeping
    if number == signal.SIGINT:
        os.killpg(creator.pid, number)  # as Ctrl-C in a terminal
    else:
        os.kill(creator.pid, number)
    creator.communicate(timeout=60)
    if number == signal.SIGKILL:  # the next one who creates hosts removes them
        with Hosts(0):
            pass
    assert name.split("-")[0] not in ip("netns list")
    wait_for(lambda: not os.path.exists(f"/proc/{sleeping}"))


def test_machine_without_network_namespaces_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    with pytest.raises(Unavailable, match="ip"), Hosts(1):
        pass


def test_each_worker_knows_its_task():
    assert '"index": 1' in Hosts(2).tf_config(1) and "10.77.0.2:2222" in Hosts(2).tf_config(0)
    assert socket.inet_aton(Hosts(4).addresses[3])
