"""Workers on hosts of their own, as network namespaces make them: nothing shared but the disk."""

import json
import os
import subprocess

import pytest

from ctl.hardware.cluster import Cluster
from tests import child
from tests.end_to_end.processes_test import EXPERIMENT, program, result

PORT = 2222


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(request):
    """Network namespaces with an address each, joined by a bridge in one more."""
    count, prefix = request.param, f"ctl{os.getpid()}"
    names = [f"{prefix}-{i}" for i in range(count)]
    made = []
    try:
        try:
            for name in (f"{prefix}-hub", *names):
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            hub = made[0]
            ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            ip("-n", hub, "link", "set", "bridge", "up")
            for i, name in enumerate(names):
                ip(
                    "-n",
                    hub,
                    "link",
                    "add",
                    f"port{i}",
                    "type",
                    "veth",
                    "peer",
                    "eth0",
                    "netns",
                    name,
                )
                ip("-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", None) or error
            pytest.skip(f"this machine cannot make network namespaces: {told}")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 3], indirect=True)
def test_workers_on_hosts_of_their_own_train_and_evaluate_exactly(hosts, tmp_path):
    (tmp_path / "small.py").write_text(EXPERIMENT)
    addresses = {"worker": [f"10.77.0.{i + 1}:{PORT}" for i in range(len(hosts))]}
    workers = []
    for i, host in enumerate(hosts):
        place = Cluster(addresses, "worker", i)
        command = ["ip", "netns", "exec", host, child.PYTHON]
        workers.append(
            subprocess.Popen(
                [*command, *program(tmp_path, "run", "--config.data.global_batch_size=25")],
                env=child.environment(TF_CONFIG=place.tf_config()),
                cwd=child.ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * len(hosts), said
    found = result(tmp_path / "run")
    assert found["step"] == 50 and found["replicas"] == len(hosts)
    assert found["eval"]["examples"] == 203
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["start", "checkpoint", "eval", "end"]
