"""Slurm starts a run, which continues with the same bits after a stop, if it is installed."""

import pytest

from tests.end_to_end.paused_run import Folder
from tests.end_to_end.slurm import Slurm
from tests.support import child

pytestmark = pytest.mark.slow
SCRIPT = child.ROOT / "deploy/slurm/mnist.sbatch"


@pytest.fixture
def slurm(tmp_path_factory):
    # Not below the folder of the test, whose path is too long for the sockets of Slurm.
    with Slurm(tmp_path_factory.mktemp("slurm") / "files") as slurm:
        yield slurm


def test_slurm_job_saves_before_its_time_limit_and_continues_with_the_same_bits(slurm, tmp_path):
    folder, text = Folder(tmp_path), SCRIPT.read_text()
    assert "--partition=gpu" in text
    script = text.replace("--partition=gpu", "--partition=test")
    (folder.path / "mnist.sbatch").write_text(script)
    folder.pause()
    submitted = slurm.run("sbatch", "--parsable", "mnist.sbatch", cwd=folder.path)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    folder.wait_until_paused()
    # Ten minutes before the time limit is now: Slurm notices it within half a minute.
    assert slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10").returncode == 0
    output = folder.path / f"slurm-{job}.out"
    child.wait_for(lambda: "SIGTERM: saving, then stopping" in output.read_text())
    assert slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=480").returncode == 0
    folder.go_on()
    slurm.wait(job)
    events = folder.check("mnist")
    assert events.index(("stop", 15)) < events.index(("resume", 15))
    output = output.read_text()
    assert "Resumed from" in output
    assert "TensorFlow binary" not in output  # it is imported after its messages are turned off
    assert not slurm.processes()
