"""A network that stops: a short stop costs its time; a long one ends the run, which resumes."""

import json
import os
import pathlib
import sys
import time

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable
from ctl import main
from tests.support import child, experiments

STEPS = 2000
HEARTBEAT = 20.0


@pytest.fixture
def hosts():
    try:
        with Hosts(2) as hosts:
            yield hosts
    except Unavailable as error:
        pytest.skip(str(error))


def start(hosts, folder):
    command = [
        sys.executable, "-m", "ctl.main", f"--config={folder / 'experiment.py'}",
        f"--workdir={folder / 'run'}", f"--config.runtime.cluster.heartbeat_timeout={HEARTBEAT}",
        *flags(),
    ]  # fmt: skip
    return hosts.start(command, environment=child.environment(), cwd=child.ROOT, **child.PIPES)


def flags():
    return [
        f"--config.train.steps={STEPS}", "--config.train.steps_per_loop=20",
        "--config.train.checkpoint_interval=200", "--config.eval.interval=0",
        "--config.data.global_batch_size=8",
    ]  # fmt: skip


def last_step(folder):
    path = pathlib.Path(folder, "run/metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(processes, folder, step):
    def is_reached():
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        return last_step(folder) >= step

    child.wait_for(is_reached)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="namespaces require root")
def test_short_stop_costs_its_time_and_a_long_one_ends_the_run_which_resumes_with_the_same_bits(
    tmp_path, hosts
):
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    processes = start(hosts, tmp_path)
    wait_for_step(processes, tmp_path, 400)
    hosts.cut(1)
    time.sleep(5)
    step = last_step(tmp_path)
    hosts.reconnect(1)
    wait_for_step(processes, tmp_path, step + 200)

    hosts.cut(1)
    cut = time.monotonic()
    outputs = [process.communicate(timeout=240) for process in processes]
    # Ending takes seconds, on a busy machine more.
    assert time.monotonic() - cut < HEARTBEAT + 60, outputs
    step = last_step(tmp_path)
    assert step < STEPS, outputs
    for i, (process, (_, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 75, err
        (line,) = (line for line in err.splitlines() if line.startswith("ctl:"))
        assert f"worker {i} stops, because worker {1 - i} has ended or cannot be reached" in line

    hosts.reconnect(1)
    processes = start(hosts, tmp_path)
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "Resumed from" in outputs[0][0]

    undisturbed = tmp_path / "undisturbed"
    config, workdir = f"--config={tmp_path / 'experiment.py'}", f"--workdir={undisturbed}"
    replicas = "--config.runtime.logical_devices=2"
    assert main.run(["ctl", config, workdir, *flags(), replicas]) == 0
    experiments.check_same(*map(experiments.read_weights, (tmp_path / "run", undisturbed)))
