"""Workers on separate hosts, simulated by Linux network namespaces: only the disk is shared."""

import subprocess

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable
from tests import child, experiments


@pytest.fixture
def hosts(request):
    try:
        with Hosts(request.param) as hosts:
            yield hosts
    except Unavailable as error:
        pytest.skip(f"this machine cannot create network namespaces: {error}")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("hosts", [2, 3], indirect=True)
def test_workers_on_separate_hosts_train_and_evaluate_every_example_once(hosts, tmp_path):
    experiments.write(tmp_path, {"small.py": experiments.MNIST})
    arguments = [f"--config={tmp_path}/small.py", f"--workdir={tmp_path}/run"]
    arguments += ["--config.data.global_batch_size=25"]
    workers = hosts.start(
        [child.PYTHON, "-m", "ctl.main", *arguments],
        environment=child.environment(),
        cwd=child.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs
    result = experiments.read_result(tmp_path / "run")
    assert result["step"] == 50 and result["replicas"] == len(workers)
    assert result["eval"]["examples"] == 203
    events = [event for event, _ in experiments.read_events(tmp_path / "run")]
    assert events == ["start", "checkpoint", "eval", "end"]
