"""The program from end to end: the files it writes, how it resumes, and what it prints."""

import contextlib
import io
import json
import pathlib
import re
import shutil
import signal
import time
import types

import pytest
import tensorflow as tf

from benchmarks import workdir_state
from benchmarks.workdir_state import read_metrics
import ctl
from ctl import main
from tests.support import child, experiments
from tests.support.experiments import read_events, read_result

WORKDIR = pathlib.Path("runs", "experiment")


def run(*arguments):
    """Runs the program on the experiment in the current folder; returns its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(["ctl", "--config=experiment.py", *arguments])
    return types.SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    """The folder of a complete run of 30 steps, and what it printed; not to be changed.

    The wall clock goes back by an hour at each reading, so that no duration may depend on it.
    """
    folder, now = tmp_path_factory.mktemp("complete"), iter(range(10**9, 0, -3600))
    experiments.write(folder, {"experiment.py": experiments.DROPOUT})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(time, "time", lambda: float(next(now)))
        return folder, run()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the experiment."""
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_writes_its_workdir(complete_run, monkeypatch):
    folder, printed = complete_run
    monkeypatch.chdir(folder)
    assert (printed.code, printed.err) == (0, "")
    first, *_, last = printed.out.splitlines()
    assert "one_device" in first and "global batch 7" in first
    assert last.startswith("Done: runs/experiment/result.json")
    result = read_result(WORKDIR)
    keys = "step train eval examples_per_second seconds strategy replicas versions host goodput"
    assert set(result) == {*keys.split(), "flops_per_step"}
    assert result["step"] == 30
    assert result["eval"]["examples"] == 50
    assert set(result["eval"]) == {"loss", "accuracy", "examples"}
    assert 0 < result["seconds"] < 1_000 and 0 < result["examples_per_second"] < 1e6
    left = re.findall(r"\| ([^|]*) left", printed.out)  # with the wall clock: hours, or negative
    assert all(re.fullmatch(r"\d+ s|\d+ min \d+ s", text) for text in left), left
    assert (result["strategy"], result["replicas"]) == ("one_device", 1)
    assert result["versions"]["tensorflow"] == tf.__version__
    config = json.loads((WORKDIR / "config.json").read_text())
    assert config["data"]["global_batch_size"] == 7
    first, *events, last = read_events(WORKDIR)
    assert (first, last) == (("start", 0), ("end", 30))
    # A thread records a checkpoint when it is complete.
    assert sorted(events) == [
        ("checkpoint", 10), ("checkpoint", 20), ("checkpoint", 30), ("eval", 15), ("eval", 30)
    ]  # fmt: skip
    summaries = WORKDIR / "summaries"
    folders = {path for path in summaries.iterdir() if path.is_dir()}
    assert folders == {summaries / "train", summaries / "eval"}
    assert len(list(summaries.glob("events*"))) == 1  # the config and the hparams


def test_a_complete_run_is_left_alone_and_can_be_extended(folder, complete_run):
    shutil.copytree(complete_run[0] / WORKDIR, WORKDIR)
    before = (WORKDIR / "result.json").read_text()
    printed = run()
    assert printed.code == 0
    assert "complete: 30 steps" in printed.out
    assert "--config.train.steps=60" in printed.out and "--fresh" in printed.out
    assert (WORKDIR / "result.json").read_text() == before
    printed = run("--config.train.steps=60")
    assert printed.code == 0 and "Resumed from" in printed.out
    assert read_result(WORKDIR)["step"] == 60


def test_fresh_moves_the_old_run_aside_and_starts_from_scratch(folder, complete_run):
    shutil.copytree(complete_run[0] / WORKDIR, WORKDIR)
    printed = run("--fresh")
    assert printed.code == 0
    (aside,) = [path for path in pathlib.Path("runs").iterdir() if path.name != "experiment"]
    assert str(aside) in printed.out
    assert read_result(aside)["step"] == 30
    check_same(WORKDIR, aside)


def check_same(workdir, other, *, tolerance=0.0):
    weights = (experiments.read_weights(run, 30) for run in (workdir, other))
    experiments.check_same(*weights, tolerance=tolerance)


@pytest.mark.slow
def test_a_killed_and_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(
    folder, complete_run
):
    """SIGKILL in saving step 20, SIGINT in the evaluation of step 15, then to the end."""
    uninterrupted = complete_run[0] / WORKDIR
    metrics = read_metrics(uninterrupted)
    program = ["--", "--config=experiment.py", "--workdir=run"]
    faults = ["-m", "tests.support.faults"]
    blocking = "--config.train.checkpoint_writing=blocking"  # step 10 is complete
    killed = child.run([*faults, "--kill=save:2", *program, blocking], cwd=folder)
    assert killed.returncode == -signal.SIGKILL
    assert read_metrics("run") == metrics[:5]
    stopped = child.run([*faults, "--kill=eval:1", "--signal=SIGINT", *program], cwd=folder)
    assert (stopped.returncode, stopped.stderr) == (75, "")
    assert "SIGINT: saving, then stopping" in stopped.stdout
    assert "rerun the same command" in stopped.stdout
    name, step = read_events("run")[-1]
    assert name == "stop" and step < 30
    assert run("--workdir=run").code == 0
    check_same("run", uninterrupted)
    assert read_metrics("run") == metrics
    events = workdir_state.read_events(pathlib.Path("run"))
    first, second = (event for event in events if event["event"] == "resume")
    assert (first["step"], first["lost_steps"], second["step"]) == (10, 10, step)
    goodput = read_result("run")["goodput"]
    lost = sum(resume.get("lost_seconds", 0) for resume in (first, second))
    assert goodput["lost"] == pytest.approx(lost / goodput["seconds"])
    shares = sum(share for name, share in goodput.items() if name != "seconds")
    assert shares == pytest.approx(1.0)
    assert all(goodput[name] > 0 for name in ("steps", "evaluation", "saving", "starting"))


def test_evaluation_in_which_a_run_was_killed_is_repeated(folder, complete_run, monkeypatch):
    metrics = read_metrics(complete_run[0] / WORKDIR)
    expected = [("train", 5), ("train", 10), ("train", 15), ("eval", 15), ("train", 20),
                ("train", 25), ("train", 30), ("eval", 30)]  # fmt: skip
    assert [(line["split"], line["step"]) for line in metrics] == expected
    calls = []

    def fail_in_the_second(evaluator):
        calls.append(evaluator)
        if len(calls) == 2:
            raise RuntimeError("killed")
        return eval_end(evaluator)

    eval_end = ctl.StandardEvaluator.eval_end
    monkeypatch.setattr(ctl.StandardEvaluator, "eval_end", fail_in_the_second)
    flags = ("--workdir=run", "--config.train.checkpoint_writing=blocking")
    assert run(*flags).code == 2  # an error of the user's code
    assert read_metrics("run") == metrics[:7]
    assert run(*flags).code == 0
    assert read_metrics("run") == metrics


@pytest.mark.slow
def test_only_ctls_own_lines_are_printed(folder):
    """TensorFlow's messages at start-up are suppressed."""
    done = child.run(
        ["-m", "ctl.main", "--config=experiment.py", "--config.train.steps=3"],
        cwd=folder, fresh=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first_words = [line.split()[0] for line in done.stdout.splitlines()]
    assert first_words == ["one_device", "train", "eval", "Done:"]


@pytest.mark.slow
def test_autoclustering_computes_the_weights_of_the_uncompiled_run(folder):
    arguments = [
        "--config=experiment.py", "--config.model.dropout=0.0", "--config.runtime.precision=float64",
        "--config.runtime.strategy=mirrored", "--config.runtime.devices=['CPU:0','CPU:1']",
    ]  # fmt: skip
    assert run(*arguments[1:], "--config.runtime.xla=off", "--workdir=off").code == 0
    # It is enabled for a complete process.
    arguments[-1] = "--config.runtime.logical_devices=2"
    autocluster = ["--config.runtime.xla=autocluster", "--workdir=autocluster"]
    done = child.run(["-m", "ctl.main", *arguments, *autocluster], cwd=folder)
    assert done.returncode == 0, done.stderr
    check_same("autocluster", "off", tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.long
def test_mnist_reaches_99_percent(tmp_path):
    run = ["-m", "ctl.main", "--config=experiments/mnist.py", f"--workdir={tmp_path}"]
    done = child.run(run, timeout=600)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path)["eval"]
    assert result["accuracy"] >= 0.99 and result["examples"] == 10_000
