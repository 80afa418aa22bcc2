"""Complete runs of the program: kills, the time to the first step, and evaluations."""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import loops, variants
from benchmarks.gpu import devices
from benchmarks.gpu.parts import Report
from benchmarks.models import MNIST, MODELS
from benchmarks.windows import run_window
from benchmarks.workdir_state import read_weights
import ctl

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


def measure_start_up(report: Report) -> None:
    """The devices, the time to the first step, and compilation with a persistent XLA cache."""
    with report.attempt("--mode=devices"):
        seconds, output = _run("--mode=devices")
        report("--mode=devices", seconds=seconds, output=output.splitlines()[:20])
    keys = {"train.steps": 1, "train.steps_per_loop": 1, "eval.splits": "[]"}
    if report.small:
        keys["data.global_batch_size"] = 8
    with tempfile.TemporaryDirectory() as folder, report.attempt("one step of MNIST"):
        seconds, _ = _run(*_flags(keys, pathlib.Path(folder, "run")))
        report("one step of MNIST", seconds=seconds)
    model = "empty" if report.small else "mnist256"
    with tempfile.TemporaryDirectory() as cache:
        # Without the cache, with an empty one, and with a full one.
        for name, folder in (("no cache", ""), ("empty cache", cache), ("full cache", cache)):
            with report.attempt(f"XLA, {name}"):
                _measure_compilation(report, f"XLA, {name}", model, folder)


def _measure_compilation(report: Report, name: str, model: str, cache: str) -> None:
    """The first loop of `runtime.xla=loop`, which traces and compiles."""
    before = os.environ.get("TF_XLA_FLAGS", "")
    flags = f"--tf_xla_persistent_cache_directory={cache} --tf_xla_persistent_cache_prefix=ctl"
    try:
        os.environ["TF_XLA_FLAGS"] = f"{before} {flags}" if cache else before
        with loops.worker(f"{variants.CTL}loop", model) as process:
            first = run_window(name, process, 0.0)
            second = run_window(name, process, 0.0)
    finally:
        os.environ["TF_XLA_FLAGS"] = before
    files = len(list(pathlib.Path(cache).iterdir())) if cache else 0
    seconds = {"first_loop_seconds": first["seconds"], "second_loop_seconds": second["seconds"]}
    report(name, model=model, files=files, **{k: round(v, 2) for k, v in seconds.items()})


def measure_evaluation(report: Report) -> None:
    """Training and evaluation in turns: no evaluation may wait for a thread of the input pipeline."""
    model = MODELS["mnist64" if report.small else "mnist256"]
    trainer = variants.Trainer(
        model,
        strategy=devices.make_strategy(1),
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        options=ctl.TrainerOptions(),
    )
    evaluator = ctl.StandardEvaluator(trainer)
    rounds, steps = (2, 2) if report.small else (6, 200)
    training, evaluation = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        trainer.train(tf.constant(steps))
        middle = time.perf_counter()
        evaluator.evaluate(tf.constant(steps if report.small else -1))
        training.append(round(middle - start, 3))
        evaluation.append(round(time.perf_counter() - middle, 3))
    slowest = max(evaluation[1:]) / statistics.median(evaluation[1:])
    stalls = {"error": "an evaluation stalls"} if slowest > 3 and not report.small else {}
    report("evaluation", training_seconds=training, evaluation_seconds=evaluation, **stalls)


def _flags(keys: dict[str, object], workdir: pathlib.Path) -> list[str]:
    values = {**keys, "data.dir": MNIST}
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    return [f"--config={_CONFIG}", f"--workdir={workdir}", *flags]


def _start(keys: dict[str, object], workdir: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "ctl.main", *_flags(keys, workdir)]
    return subprocess.Popen(command, cwd=_ROOT, stdout=sys.stderr)


def _run(*flags: str) -> tuple[float, str]:
    """Runs the program; returns its seconds and what it prints."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "ctl.main", *flags]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {run.returncode}: {run.stderr[-300:]}")
    return round(time.perf_counter() - start, 2), run.stdout


def _check(run: subprocess.Popen) -> None:
    if run.wait():
        raise RuntimeError(f"a run ended with exit code {run.returncode}")


def _wait_for(checkpoint: pathlib.Path, run: subprocess.Popen) -> None:
    """Waits until a checkpoint, of which this is the prefix, is written."""
    while not checkpoint.with_name(f"{checkpoint.name}.index").exists():
        if run.poll() is not None:
            raise RuntimeError(
                f"the run ended with exit code {run.returncode} before it was killed"
            )
        time.sleep(_POLL_SECONDS)
