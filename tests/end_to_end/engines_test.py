"""Slurm, MPI and Ray start a run, which continues with the same bits after a stop or a kill.

Each test is skipped where the program is not installed; BUILD.md says how to install them.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import child, experiments
from tests.docs.pages import blocks
from tests.end_to_end.slurm import Slurm

pytestmark = pytest.mark.slow
SCRIPT = child.ROOT / "deploy/slurm/mnist.sbatch"
CONFIG = "experiments/mnist_multi_worker.py"
# Both workers wait at step 15, between two checkpoints, as long as there is a file `pause`.
EXPERIMENT = """\
import os
import pathlib
import time

PAUSE = pathlib.Path(__file__).with_name("pause")


class Pause(ctl.Action):
    at = "train"
    everywhere = True
    may_stop = False

    def __call__(self, outputs):
        if self.controller.step != 15 or not PAUSE.exists():
            return
        started = PAUSE.with_name(f"paused-{int(not self.controller.is_chief)}")
        started.with_suffix(".new").write_text(str(os.getpid()))
        started.with_suffix(".new").rename(started)
        while PAUSE.exists() and not self.controller._stop.requested:
            time.sleep(0.05)
"""
EDITS = {
    "experiment.py:Trainer": "mnist_multi_worker.py:Trainer",
    "model=dict(dropout=0.3),": 'model=dict(dropout=0.3), actions=["mnist_multi_worker.py:Pause"],',
}


class Folder:
    """A checkout with one experiment, whose workers can be paused.

    Attributes:
        path: the folder.
        expected: the weights of the run that ctl.launch has started and nothing has disturbed.
    """

    def __init__(self, path):
        self.path = path
        text = experiments.DROPOUT + EXPERIMENT
        for old, new in EDITS.items():
            assert old in text
            text = text.replace(old, new)
        experiments.write(path, {CONFIG: text, "experiments/mnist.py": text})
        (path / ".venv").symlink_to(sys.prefix)
        command = ["-m", "ctl.launch", "--workers=2", "--", CONFIG, "--workdir=runs/expected"]
        done = child.run(command, cwd=path)
        assert done.returncode == 0, done.stderr
        self.expected = experiments.read_weights(path / "runs/expected")

    def pause(self):
        """Lets the next run wait at step 15."""
        for name in ("paused-0", "paused-1"):
            (self.path / "experiments" / name).unlink(missing_ok=True)
        (self.path / "experiments/pause").touch()

    def go_on(self):
        (self.path / "experiments/pause").unlink()

    def wait_until_paused(self):
        """Returns the pids of the two workers once both wait."""
        paths = [self.path / f"experiments/paused-{i}" for i in range(2)]
        wait_for(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def check(self, name):
        """Asserts that a run resumed from step 10 and has the expected bits."""
        events = experiments.read_events(self.path / "runs" / name)
        assert ("start", 0) in events and events[-1] == ("end", 30), events
        weights = experiments.read_weights(self.path / "runs" / name)
        assert weights.keys() == self.expected.keys()
        for key, value in self.expected.items():
            np.testing.assert_array_equal(weights[key], value, err_msg=key)
        return events


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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

    def stops():
        return ("stop", 15) in experiments.read_events(folder.path / "runs/mnist")

    wait_for(stops)
    folder.go_on()
    slurm.wait(job, "PENDING")
    changes = ("TimeLimit=480", "StartTime=now")
    assert slurm.run("scontrol", "update", f"JobId={job}", *changes).returncode == 0
    slurm.wait(job, "COMPLETED")
    events = folder.check("mnist")
    assert events.index(("stop", 15)) < events.index(("resume", 15))
    output = (folder.path / f"slurm-{job}.out").read_text()
    assert "SIGTERM: saving, then stopping" in output and "Resumed from" in output
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
    _, worker = folder.wait_until_paused()
    os.kill(worker, signal.SIGKILL)
    folder.go_on()
    _, err = step.communicate(timeout=300)
    assert step.returncode == 128 + signal.SIGKILL, err
    assert not slurm.processes()
    assert "worker 0 stops, because worker 1 has ended or cannot be reached" in err


def start_mpi(folder):
    command = [
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m",
        "ctl.main", CONFIG, "--workdir=runs/mpi",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = child.environment(
        TMPDIR="/tmp"
    )  # Open MPI limits the length of its sockets' paths
    return subprocess.Popen(
        command, cwd=folder.path, env=environment, start_new_session=True, **pipes
    )


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: see BUILD.md")
def test_mpi_run_continues_with_the_same_bits_after_a_kill(folder):
    folder.pause()
    run = start_mpi(folder)
    others = folder.wait_until_paused()
    os.kill(others[1], signal.SIGKILL)
    folder.go_on()
    _, err = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGKILL, err
    wait_for(lambda: not pathlib.Path(f"/proc/{others[0]}").exists())
    run = start_mpi(folder)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "worker 0 of 2 processes" in out
    assert ("resume", 10) in folder.check("mpi")


# After the block of docs/clusters.md.
RAY = """
import json
import pathlib

files = sorted(path.name for path in pathlib.Path(result.checkpoint.path).rglob("ckpt-*"))
train = dict(metrics=result.metrics, files=files, step=result.return_value["step"])
best = results.get_best_result("eval/accuracy", "max").metrics["eval/accuracy"]
tune = dict(errors=results.num_errors, steps=[trial.metrics["step"] for trial in results], best=best)
pathlib.Path("outcome.json").write_text(json.dumps([train, tune]))
"""


def test_ray_restarts_a_killed_worker_and_the_run_has_the_same_bits(folder, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: see BUILD.md")
    # Not below pytest's folder, whose path is too long for the sockets of Ray.
    temporary = pathlib.Path(f"/tmp/ctl-ray-{os.getpid()}")
    (code,) = blocks("clusters")
    variables = {
        "RAY_TMPDIR": str(temporary),
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    folder.pause()
    run = child.start(["-c", code + RAY], cwd=folder.path, **variables)
    try:
        _, worker = folder.wait_until_paused()
        os.kill(worker, signal.SIGKILL)
        folder.go_on()
        _, err = run.communicate(timeout=600)
        assert run.returncode == 0, err
    finally:
        run.kill()
        shutil.rmtree(temporary, ignore_errors=True)
    trained, tuned = json.loads((folder.path / "outcome.json").read_text())
    assert trained["step"] == trained["metrics"]["step"] == 30
    assert {"ckpt-30.index", "ckpt-30.whole"} <= set(trained["files"])
    assert trained["metrics"]["eval/accuracy"] > 0 and "train/loss" in trained["metrics"]
    assert ("resume", 10) in folder.check("mnist_multi_worker")
    assert (tuned["errors"], tuned["steps"]) == (0, [30, 30])
    accuracies = [
        experiments.read_result(folder.path / f"runs/mnist.ray/learning_rate={rate}")["eval"][
            "accuracy"
        ]
        for rate in (0.001, 0.003)
    ]
    assert tuned["best"] == max(accuracies)
