"""Simulated hosts disappear; program_test.py measures their rates, partition_test.py cuts a link."""

import os
import signal
import socket
import sys

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable, ip
from tests.support import child

INTERRUPTED = """
import signal, subprocess, sys, time
from benchmarks.network.namespaces import Hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
with Hosts(2) as hosts:
    hosts.popen(0, ["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(hosts.names[0], flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_hosts_and_their_processes_disappear_with_their_creator(number):
    creator = child.start(["-c", INTERRUPTED])
    name = creator.stdout.readline().strip()
    assert name in ip("netns list")
    # `ip netns exec` enters the namespace shortly after it has started.
    (sleeping,) = child.wait_for(lambda: ip(f"netns pids {name}").split())
    if number == signal.SIGINT:
        os.killpg(creator.pid, number)  # as Ctrl-C in a terminal
    else:
        os.kill(creator.pid, number)
    creator.communicate(timeout=60)
    if number == signal.SIGKILL:  # the next one who creates hosts removes them
        with Hosts(0):
            pass
    assert name.split("-")[0] not in ip("netns list")
    child.wait_for(lambda: not os.path.exists(f"/proc/{sleeping}"))


def test_machine_without_network_namespaces_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    with pytest.raises(Unavailable, match="ip"), Hosts(1):
        pass


def test_each_worker_knows_its_task():
    assert '"index": 1' in Hosts(2).tf_config(1) and "10.77.0.2:2222" in Hosts(2).tf_config(0)
    assert socket.inet_aton(Hosts(4).addresses[3])
