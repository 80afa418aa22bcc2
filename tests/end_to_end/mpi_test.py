"""Open MPI starts a run, which continues with the same bits after a kill, if it is installed."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.paused_run import CONFIG, Folder
from tests.support import child

pytestmark = pytest.mark.slow


def start_mpi(folder):
    command = [
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m",
        "ctl.main", CONFIG, "--workdir=runs/mpi",
    ]  # fmt: skip
    variables = child.environment(TMPDIR="/tmp")  # Open MPI limits the length of its sockets' paths
    options = {"cwd": folder.path, "env": variables, "start_new_session": True, **child.PIPES}
    return subprocess.Popen(command, **options)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: see BUILD.md")
def test_mpi_run_continues_with_the_same_bits_after_a_kill(tmp_path):
    folder = Folder(tmp_path)
    folder.pause()
    run = start_mpi(folder)
    others = folder.wait_until_paused(run)
    os.kill(others[1], signal.SIGKILL)
    folder.go_on()
    _, err = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGKILL, err
    child.wait_for(lambda: not pathlib.Path(f"/proc/{others[0]}").exists())
    run = start_mpi(folder)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "worker 0 of 2 processes" in out
    assert ("resume", 10) in folder.check("mpi")
