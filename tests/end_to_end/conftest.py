"""The runs that several files compare with."""

import subprocess
import types

import pytest

from ctl import launch, main
from ctl.hardware import child_process
from tests.end_to_end.launching import flags
from tests.support import experiments, fork_server
from tests.support.experiments import read_result, read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    experiments.write(folder, {"small.py": experiments.MNIST})
    return folder


@pytest.fixture(scope="module")
def one_replica(folder):
    """Global batch size -> the weights and the result of training on one replica."""
    runs = {}

    def train(batch):
        if batch not in runs:
            name = f"one-{batch}"
            size = f"--config.data.global_batch_size={batch}"
            assert main.run(["ctl", *flags(folder, name, size)]) == 0
            runs[batch] = read_weights(folder / name), read_result(folder / name)
        return runs[batch]

    return train


class Fork(fork_server.Popen):
    """A process of the launcher, forked from one that has imported TensorFlow."""

    def __init__(self, command, *, env, pass_fds, **arguments):
        del pass_fds  # the pipe by which it would notice that the launcher has ended
        env = {name: value for name, value in env.items() if name != child_process.PIPE}
        super().__init__(command, env=env, stdin=subprocess.DEVNULL, **arguments)


@pytest.fixture
def run_launcher(monkeypatch, capfd):
    """Runs `-m ctl.launch` and its arguments in this process; returns the exit code and the output."""
    forking = types.SimpleNamespace(**{**vars(subprocess), "Popen": Fork})
    monkeypatch.setattr(child_process, "subprocess", forking)

    def run(command):
        capfd.readouterr()
        return launch.main(command[2:]), *capfd.readouterr()

    return run
