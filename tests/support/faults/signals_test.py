"""Processes of a launcher are listed by name, and killed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import ctl
from tests.support import child, experiments
from tests.support.faults import signals

LAUNCHER = """
import json, os, subprocess, sys
for index in range(2):
    config = json.dumps({"task": {"type": "worker", "index": index}})
    subprocess.Popen(["sleep", "60"], env={**os.environ, "TF_CONFIG": config})
subprocess.Popen(["sleep", "60"])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher():
    """The pid of a process that has two workers and one other child process."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for_state(pid, states, seconds=30):
    """Waits until the state of a process in /proc is one of `states`: T stopped, Z zombie, ..."""
    deadline = time.monotonic() + seconds
    while True:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in states:
            return
        assert time.monotonic() < deadline, f"{pid} is in state {state}"
        time.sleep(0.01)


RUNNING = "RSD"


def test_workers_are_found_by_their_names_and_dropped(launcher):
    pids = signals.workers(launcher)
    assert list(pids) == ["worker 0", "worker 1"]
    assert len(set(pids.values())) == 2
    assert signals.drop(launcher, "worker 1") == pids["worker 1"]
    wait_for_state(pids["worker 1"], "Z")
    wait_for_state(pids["worker 0"], RUNNING)
    assert signals.workers(launcher) == {"worker 0": pids["worker 0"]}
    with pytest.raises(ctl.UsageError, match=r"no running child process 'worker 1'.*: worker 0\."):
        signals.drop(launcher, "worker 1")
    assert signals.workers(os.getpid()) == {}


WORKERS = """
import experiment

def get_config():
    config = experiment.get_config()
    config.train.update(steps=60, steps_per_loop=2, checkpoint_interval=10)
    return config
"""
RUN = ["--config=workers.py", "--mode=train"]


@pytest.mark.slow
@pytest.mark.long
def test_worker_killed_at_a_step_is_restarted_without_the_kill(undisturbed):
    experiments.write(undisturbed, {"workers.py": WORKERS})
    command = ["-m", "ctl.launch", "--workers=2", "--", *RUN, "--workdir=two"]
    whole = child.run(command, cwd=undisturbed)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    kill = ["--kill=step:33", "--workers=2", "--worker=1", "--max_restarts=1"]
    run = child.run(
        ["-m", "tests.support.faults", *kill, "--", *RUN, "--workdir=restarted"], cwd=undisturbed
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "worker 1 failed first (killed by SIGKILL)" in run.stderr
    assert "Resumed from restarted/checkpoints/ckpt-30." in run.stdout
    expected = experiments.read_weights(undisturbed / "two", 60)
    weights = experiments.read_weights(undisturbed / "restarted", 60)
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
