"""Workers on separate hosts, simulated by Linux network namespaces: only the disk is shared."""

import os
import subprocess

import pytest

from ctl.hardware.cluster import Cluster
from tests import child, experiments

PORT = 2222


def ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(request):
    """The names of network namespaces 10.77.0.1, 10.77.0.2, ... on one bridge."""
    prefix = f"ctl{os.getpid()}"  # unique, since the names are global to the machine
    hub, names = f"{prefix}-hub", [f"{prefix}-{i}" for i in range(request.param)]
    created = []
    try:
        try:
            for name in (hub, *names):
                ip(f"netns add {name}")
                created.append(name)
                ip(f"-n {name} link set lo up")
            ip(f"-n {hub} link add bridge type bridge")
            ip(f"-n {hub} link set bridge up")
            for i, name in enumerate(names):
                ip(f"-n {hub} link add port{i} type veth peer eth0 netns {name}")
                ip(f"-n {hub} link set port{i} master bridge up")
                ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev eth0")
                ip(f"-n {name} link set eth0 up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"this machine cannot create network namespaces: {reason}")
        yield names
    finally:
        for name in created:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [pytest.param(2, marks=pytest.mark.long), 3], indirect=True)
def test_workers_on_separate_hosts_train_and_evaluate_every_example_once(hosts, tmp_path):
    experiments.write(tmp_path, {"small.py": experiments.MNIST})
    addresses = {"worker": [f"10.77.0.{i + 1}:{PORT}" for i in range(len(hosts))]}
    arguments = [f"--config={tmp_path}/small.py", f"--workdir={tmp_path}/run"]
    arguments += ["--config.data.global_batch_size=25"]
    workers = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, child.PYTHON, "-m", "ctl.main", *arguments],
            env=child.environment(TF_CONFIG=Cluster(addresses, "worker", i).tf_config()),
            cwd=child.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, host in enumerate(hosts)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * len(hosts), outputs
    result = experiments.read_result(tmp_path / "run")
    assert result["step"] == 50 and result["replicas"] == len(hosts)
    assert result["eval"]["examples"] == 203
    events = [event for event, _ in experiments.read_events(tmp_path / "run")]
    assert events == ["start", "checkpoint", "eval", "end"]
