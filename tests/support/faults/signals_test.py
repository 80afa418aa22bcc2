"""Processes of a launcher are listed by name."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.faults import signals

LAUNCHER = """
import json, os, subprocess, sys
for index in range(2):
    config = json.dumps({"task": {"type": "worker", "index": index}})
    subprocess.Popen(["sleep", "60"], env={**os.environ, "TF_CONFIG": config})
subprocess.Popen(["sleep", "60"])
print("started", flush=True)
for line in sys.stdin:  # a signal has been sent to a worker
    print(os.wait()[0], flush=True)
"""


@pytest.fixture
def launcher():
    """A process that has two workers and one other child process."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_workers_that_run_are_listed_by_their_names(launcher):
    pids = signals.workers(launcher.pid)
    assert list(pids) == ["worker 0", "worker 1"] and len(set(pids.values())) == 2
    os.kill(pids["worker 1"], signal.SIGKILL)
    launcher.stdin.write("\n")
    launcher.stdin.flush()
    assert launcher.stdout.readline() == f"{pids['worker 1']}\n"
    assert signals.workers(launcher.pid) == {"worker 0": pids["worker 0"]}
    assert signals.workers(os.getpid()) == {}
