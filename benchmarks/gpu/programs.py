"""Complete runs of the program that are killed."""

import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks.gpu.parts import Report
from benchmarks.models import MNIST
from benchmarks.workdir_state import read_weights

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_CONFIG = "experiments/mnist.py"
_POLL_SECONDS = 0.05
_KILLS = 2


def check_resume(report: Report) -> None:
    """A run with `runtime.deterministic` that is killed twice ends with the bits of one that is not."""
    steps, kills = 300 if report.small else 6000, 0
    keys = {
        "train.steps": steps,
        "train.steps_per_loop": steps // 30,
        "train.checkpoint_interval": steps // 6,
        "eval.interval": 0,
        "data.global_batch_size": 16 if report.small else 128,
        "runtime.deterministic": True,
    }
    with tempfile.TemporaryDirectory() as folder, report.attempt("killed runs"):
        uninterrupted, killed = (pathlib.Path(folder, name) for name in ("uninterrupted", "killed"))
        with _start(keys, uninterrupted) as run:
            _check(run)
        for kill_step in (steps // 3, 2 * steps // 3):
            with _start(keys, killed) as run:
                checkpoint = kill_step // (steps // 6) * (steps // 6)
                _wait_for(killed / "checkpoints" / f"ckpt-{checkpoint}", run)
                kills += run.poll() is None
                run.kill()
        with _start(keys, killed) as run:
            _check(run)
        expected, actual = read_weights(uninterrupted), read_weights(killed)
        same = [np.array_equal(expected[name], actual[name]) for name in expected]
        counts = {"kills": kills, "variables": len(same), "equal": sum(same)}
        report("killed runs", steps=steps, **counts, **_resume_verdict(**counts))


def _resume_verdict(*, kills: int, variables: int, equal: int) -> dict[str, str]:
    """The key that makes a wrong result a failure of the run."""
    if kills < _KILLS:
        return {"error": f"{kills} of {_KILLS} kills hit the run: it ended before the others"}
    return {} if equal == variables else {"error": "the resumed run has other bits"}


def _start(keys: dict[str, object], workdir: pathlib.Path) -> subprocess.Popen:
    flags = [f"--config.{key}={value}" for key, value in {**keys, "data.dir": MNIST}.items()]
    command = [sys.executable, "-m", "ctl.main", f"--config={_CONFIG}", f"--workdir={workdir}"]
    command += flags
    return subprocess.Popen(command, cwd=_ROOT, stdout=sys.stderr)


def _check(run: subprocess.Popen) -> None:
    if run.wait():
        raise RuntimeError(f"a run ended with exit code {run.returncode}")


def _wait_for(checkpoint: pathlib.Path, run: subprocess.Popen) -> None:
    """Waits until a checkpoint, of which this is the prefix, is written."""
    while not checkpoint.with_name(f"{checkpoint.name}.index").exists():
        if run.poll() is not None:
            raise RuntimeError(f"a run ended with exit code {run.returncode} before it was killed")
        time.sleep(_POLL_SECONDS)
