"""Slurm starts a run, which continues with the same bits after a stop, if it is installed."""

import os
import signal

import pytest

from tests.end_to_end.paused_run import CONFIG, Folder, wait_for
from tests.end_to_end.slurm import Slurm
from tests.support import child, experiments

pytestmark = pytest.mark.slow
SCRIPT = child.ROOT / "deploy/slurm/mnist.sbatch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "files") as slurm:
        yield slurm


def test_slurm_job_saves_before_its_time_limit_and_continues_with_the_same_bits(slurm, folder):
    text = SCRIPT.read_text()
    for old, new in {"--partition=gpu": "--partition=test"}.items():
        assert old in text
        text = text.replace(old, new)
    (folder.path / "mnist.sbatch").write_text(text)
    folder.pause()
    submitted = slurm.run("sbatch", "--parsable", "mnist.sbatch", cwd=folder.path)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    folder.wait_until_paused()
    # Ten minutes before the time limit is now: Slurm notices it within half a minute.
    assert slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10").returncode == 0
    # Meanwhile an array trains one run per seed, each in one process.
    command = (
        f".venv/bin/python -m ctl.main {CONFIG} --workdir=runs/seed-$SLURM_ARRAY_TASK_ID "
        "--config.seed=$SLURM_ARRAY_TASK_ID"
    )
    array = slurm.run(
        "sbatch", "--parsable", "--array=1-2", f"--wrap={command}", cwd=folder.path
    ).stdout.strip()
    output = folder.path / f"slurm-{job}.out"
    wait_for(lambda: "SIGTERM: saving, then stopping" in output.read_text())
    assert slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=480").returncode == 0
    folder.go_on()
    slurm.wait(job, "COMPLETED")
    events = folder.check("mnist")
    assert events.index(("stop", 15)) < events.index(("resume", 15))
    output = output.read_text()
    assert "Resumed from" in output
    assert "TensorFlow binary" not in output  # it is imported after its messages are turned off

    for task in ("1", "2"):
        slurm.wait(f"{array}_{task}", "COMPLETED")
    seeds = [experiments.read_result(folder.path / f"runs/seed-{task}") for task in ("1", "2")]
    assert [result["step"] for result in seeds] == [30, 30]
    assert seeds[0]["eval"]["loss"] != seeds[1]["eval"]["loss"]
    assert not slurm.processes()


def test_slurm_step_ends_with_the_code_of_a_killed_task_and_leaves_no_process(slurm, folder):
    folder.pause()
    run = ["--nodes=2", "--ntasks-per-node=1", ".venv/bin/python", "-m", "ctl.main", CONFIG]
    step = slurm.popen("srun", *run, "--workdir=runs/srun", cwd=folder.path)
    _, worker = folder.wait_until_paused(step)
    os.kill(worker, signal.SIGKILL)
    folder.go_on()
    _, err = step.communicate(timeout=300)
    assert step.returncode == 128 + signal.SIGKILL, err
    assert not slurm.processes()
    assert "worker 0 stops, because worker 1 has ended or cannot be reached" in err
