"""The experiment and the launcher of runs of several processes."""

import json
import os
import subprocess
import threading
import types
from typing import ClassVar

import pytest

from ctl import launch
from ctl.hardware import child_process
from tests.support import experiments, fork_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    experiments.write(folder, {"small.py": experiments.MNIST})
    return folder


class Fork(fork_server.Popen):
    """A process of the launcher, forked from one that has imported TensorFlow.

    Attributes:
        started: all of them.
        task: the type and the index in TF_CONFIG.
    """

    started: ClassVar[list["Fork"]] = []

    def __init__(self, command, *, env, pass_fds, **arguments):
        del pass_fds  # the pipe by which it would notice that the launcher has ended
        env = {name: value for name, value in env.items() if name != child_process.PIPE}
        super().__init__(command, env=env, stdin=subprocess.DEVNULL, **arguments)
        self.task = json.loads(env["TF_CONFIG"])["task"]
        self.started.append(self)


@pytest.fixture
def run_launcher(monkeypatch, capfd):
    """Runs `-m ctl.launch` and its arguments in this process; returns the exit code and the output.

    Once the condition `when` holds, a worker with an index gets a signal: `send=(index, number)`.
    """
    forking = types.SimpleNamespace(**{**vars(subprocess), "Popen": Fork})
    monkeypatch.setattr(child_process, "subprocess", forking)
    monkeypatch.setattr(Fork, "started", [])

    def run(command, *, when=lambda: False, send=None):
        ended = threading.Event()

        def signal_worker():
            while not when():
                if ended.wait(0.02):
                    return
            (pid,) = (p.pid for p in Fork.started if p.task == {"type": "worker", "index": send[0]})
            os.kill(pid, send[1])

        thread = threading.Thread(target=signal_worker)
        capfd.readouterr()
        thread.start()
        try:
            return launch.main(command[2:]), *capfd.readouterr()
        finally:
            ended.set()
            thread.join()

    return run
