"""The program from end to end: what it writes, resumes, and says."""

import json
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from ctl import main
from tests import child, experiments
from tests.experiments import read_events, read_weights


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the program on a tiny experiment; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def program(*arguments):
        code = main.run(["ctl", "--config=experiment.py", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return program


def test_run_writes_its_workdir(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "one_device" in out.splitlines()[0] and "global batch 7" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("Done: runs/experiment/result.json")
    result = json.loads(pathlib.Path("runs/experiment/result.json").read_text())
    assert set(result) == {
        "step",
        "train",
        "eval",
        "examples_per_second",
        "seconds",
        "strategy",
        "replicas",
        "versions",
    }
    assert result["step"] == 30
    assert result["eval"]["examples"] == 50
    assert set(result["eval"]) == {"loss", "accuracy", "examples"}
    assert result["examples_per_second"] > 0 and result["seconds"] > 0
    assert (result["strategy"], result["replicas"]) == ("one_device", 1)
    assert result["versions"]["tensorflow"] == tf.__version__
    config = json.loads(pathlib.Path("runs/experiment/config.json").read_text())
    assert config["data"]["global_batch_size"] == 7
    assert read_events("runs/experiment") == [
        ("start", 0),
        ("checkpoint", 10),
        ("eval", 15),
        ("checkpoint", 20),
        ("checkpoint", 30),
        ("eval", 30),
        ("end", 30),
    ]
    assert set(pathlib.Path("runs/experiment/summaries").iterdir()) == {
        pathlib.Path("runs/experiment/summaries", split) for split in ("train", "eval")
    }


def test_durations_do_not_depend_on_the_wall_clock(run, monkeypatch):
    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))  # an hour back at each look
    start = time.monotonic()
    code, out, _ = run()
    took = time.monotonic() - start
    assert code == 0 and " left" not in out.replace(" 0 s left", "").replace(" 1 s left", "")
    result = json.loads(pathlib.Path("runs/experiment/result.json").read_text())
    assert 0 < result["seconds"] < took
    assert 25 * 7 / took < result["examples_per_second"] < 1e6


def test_complete_run_says_so_and_how_to_go_on(run):
    run()
    before = pathlib.Path("runs/experiment/result.json").read_text()
    code, out, _ = run()
    assert code == 0
    assert "complete: 30 steps" in out and "--config.train.steps=60" in out and "--fresh" in out
    assert pathlib.Path("runs/experiment/result.json").read_text() == before
    code, out, _ = run("--config.train.steps=60")
    assert code == 0 and "Resumed from" in out
    assert json.loads(pathlib.Path("runs/experiment/result.json").read_text())["step"] == 60


def test_fresh_moves_the_old_run_aside_and_begins_again(run):
    run()
    code, out, _ = run("--fresh")
    assert code == 0
    aside = [p for p in pathlib.Path("runs").iterdir() if p.name != "experiment"]
    assert len(aside) == 1 and str(aside[0]) in out
    assert json.loads((aside[0] / "result.json").read_text())["step"] == 30
    first, second = read_weights("runs/experiment", 30), read_weights(aside[0], 30)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_changed_arithmetic_stops_a_resume_and_names_both_ways_out(run):
    run("--config.train.steps=10")
    code, _, err = run("--config.optimizer.learning_rate=0.1")
    assert code == 2 and err.count("\n") == 1
    assert "optimizer.learning_rate: 0.001 -> 0.1" in err
    assert "--allow_config_change" in err and "--fresh" in err
    code, out, _ = run("--config.optimizer.learning_rate=0.1", "--allow_config_change")
    assert code == 0
    assert "Changed since the run was started: optimizer.learning_rate" in out


def test_changed_learning_rate_is_the_one_that_trains_on(run):
    run("--config.train.steps=10", "--workdir=changed")
    run("--config.train.steps=10", "--workdir=same")
    run("--config.train.steps=20", "--workdir=same")
    rate = "--config.optimizer.learning_rate=0.5"
    code, _, _ = run("--config.train.steps=20", rate, "--allow_config_change", "--workdir=changed")
    assert code == 0
    same, changed = read_weights("same", 20), read_weights("changed", 20)
    assert max(np.abs(same[name] - changed[name]).max() for name in same) > 0.1


def test_per_replica_batch_size_is_resolved_before_it_is_compared(run):
    run("--config.train.steps=10")
    sizes = ("--config.data.global_batch_size=0", "--config.data.per_replica_batch_size=7")
    code, out, _ = run("--config.train.steps=20", *sizes)
    assert code == 0 and "Resumed" in out


def test_train_mode_does_not_evaluate_and_eval_mode_does_nothing_else(run):
    code, out, _ = run("--mode=train")
    assert code == 0 and "eval" not in out.replace("--mode=eval", "")
    trained = read_weights("runs/experiment", 30)
    code, out, _ = run("--mode=eval")
    assert code == 0 and out.startswith("eval       30/30")
    result = json.loads(pathlib.Path("runs/experiment/result.json").read_text())
    assert result["eval"]["examples"] == 50 and result["train"]["loss"] > 0
    after = read_weights("runs/experiment", 30)
    assert all(np.array_equal(trained[name], after[name]) for name in trained)


def test_continuous_eval_ends_with_the_last_checkpoint(run):
    run("--mode=train")
    code, out, _ = run("--mode=continuous_eval")
    assert code == 0 and "eval       30/30" in out


@pytest.mark.parametrize("mode", ["eval", "continuous_eval"])
def test_evaluating_where_no_run_is_says_so(run, mode):
    code, _, err = run(f"--mode={mode}")
    assert code == 2 and err.count("\n") == 1 and "train first" in err
    assert not pathlib.Path("runs").exists()


def test_explain_says_what_step_will_run_and_writes_nothing(run):
    code, out, _ = run(
        "--mode=explain",
        "--config.runtime.strategy=mirrored",
        "--config.runtime.logical_devices=2",
        "--config.optimizer.clip.global_norm=1.5",
        "--config.optimizer.gradient_accumulation_steps=2",
    )
    assert code == 0
    said = dict(line.split(None, 1) for line in out.split("config:")[0].splitlines() if line)
    assert said["strategy"].startswith("mirrored (")
    assert said["replicas"] == "2"
    assert "replica 0: 0..3; replica 1: 4..6 and 1 of padding, masked" in out
    assert "2 micro-batches" in out
    assert "by global norm 1.5, after the reduction" in said["clip"]
    assert not pathlib.Path("runs").exists()


def test_accumulation_and_replicas_may_change_between_two_halves_of_a_run(run):
    run("--config.train.steps=20", "--config.runtime.precision=float64", "--workdir=whole")
    run("--config.train.steps=10", "--config.runtime.precision=float64", "--workdir=halves")
    code, _, _ = run(
        "--config.train.steps=20",
        "--config.runtime.precision=float64",
        "--workdir=halves",
        "--config.runtime.strategy=mirrored",
        "--config.runtime.logical_devices=4",
        "--config.optimizer.gradient_accumulation_steps=2",
    )
    assert code == 0
    whole, halves = read_weights("whole", 20), read_weights("halves", 20)
    for name in whole:
        np.testing.assert_allclose(halves[name], whole[name], rtol=0, atol=1e-10)


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("waited too long")


@pytest.mark.slow
def test_killed_and_interrupted_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    """Real MNIST, dropout on: kill -9 after a checkpoint, Ctrl-C later, then to the end."""
    settings = [
        "--config=experiments/mnist.py",
        "--config.train.steps=60",
        "--config.eval.interval=0",
        "--config.train.steps_per_loop=4",
        "--config.train.checkpoint_interval=8",
        "--config.train.checkpoints_to_keep=20",
    ]
    program = ["-m", "ctl.main", *settings]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = child.run([*program, f"--workdir={whole}"])
    assert undisturbed.returncode == 0, undisturbed.stderr

    def saved(step):
        return (broken / "checkpoints" / f"ckpt-{step}.index").exists()

    with child.start([*program, f"--workdir={broken}"]) as process:
        wait_for(lambda: saved(8), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    before = set((broken / "checkpoints").glob("*.index"))
    with child.start([*program, f"--workdir={broken}"]) as process:
        wait_for(lambda: set((broken / "checkpoints").glob("*.index")) - before, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    if process.returncode != 0:  # on a fast machine it may be done before the signal comes
        assert process.returncode == 75, err
        assert "SIGINT: saving, then stopping" in out and "rerun the same command" in out
        assert err == ""
        assert read_events(broken)[-1][0] == "stop"
    finished = child.run([*program, f"--workdir={broken}"])
    assert finished.returncode == 0, finished.stderr
    one, other = read_weights(whole, 60), read_weights(broken, 60)
    assert one.keys() == other.keys() and len(one) > 20
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def test_nothing_but_ctls_own_lines_is_printed(tmp_path):
    """TensorFlow's start-up noise stays out."""
    shutil.copytree(child.ROOT / "experiments/data/mnist", tmp_path / "data")
    done = child.run(
        [
            "-m",
            "ctl.main",
            "--config=experiments/mnist.py",
            "--config.train.steps=3",
            f"--config.data.dir={tmp_path / 'data'}",
            f"--workdir={tmp_path / 'run'}",
        ]
    )
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line.split()[0] for line in done.stdout.splitlines()]
    assert starts == ["one_device", "train", "eval", "Done:"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_autoclustering_gives_the_weights_of_the_uncompiled_run(tmp_path, replicas):
    """In processes of its own: it is switched on for a whole process."""
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    for xla in ("off", "autocluster"):
        done = child.run(
            ["-m", "ctl.main", "--config=experiment.py", "--config.model.dropout=0.0",
             f"--config.runtime.xla={xla}", "--config.runtime.precision=float64",
             "--config.runtime.strategy=mirrored", f"--config.runtime.logical_devices={replicas}",
             f"--workdir={xla}"], cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    off, on = read_weights(tmp_path / "off", 30), read_weights(tmp_path / "autocluster", 30)
    for name in off:
        np.testing.assert_allclose(on[name], off[name], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2))])
def test_mnist_reaches_99_percent(tmp_path, seed):
    done = child.run(
        [
            "-m",
            "ctl.main",
            "--config=experiments/mnist.py",
            f"--config.seed={seed}",
            f"--workdir={tmp_path / 'run'}",
        ],
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["eval"]["accuracy"] >= 0.99
    assert result["eval"]["examples"] == 10_000


def test_a_rollback_is_recorded_and_outlives_a_restart(run, monkeypatch):
    poisoned = experiments.DROPOUT.replace(
        "    def build_metrics",
        """    def preprocess(self, batch):
        rows = ctl.replica.current()
        if rows is None:
            return batch
        return {**batch, "x": tf.where(tf.equal(rows.step, 12), np.nan, batch["x"])}

    def build_metrics""",
    ).replace("import tf_keras", "import tensorflow as tf\nimport tf_keras")
    pathlib.Path("experiment.py").write_text(poisoned)
    options = ["--workdir=mine", "--config.train.on_non_finite=rollback"]
    code, out, err = run(*options)
    assert code == 0, err
    assert "Step 12 is not finite: the loss is first, on the examples " in out
    assert "Back to step 10; that batch is skipped from now on (rollback 1)." in out, out
    wanted = [("non_finite", 12), ("rollback", 10), ("eval", 15), ("checkpoint", 20)]
    assert read_events("mine")[3:7] == wanted
    kept = json.loads(pathlib.Path("mine/rollbacks.json").read_text())
    assert kept == {"rollbacks": [{"step": 12, "tensor": "the loss"}]}
    # From the checkpoint before it, as after a kill: the batch is left out unseen.
    before = read_weights("mine", 30)
    for path in pathlib.Path("mine/checkpoints").glob("ckpt-[23]0*"):
        path.unlink()
    code, out, err = run(*options)
    assert code == 0 and "not finite" not in out
    for name, value in read_weights("mine", 30).items():
        assert value.tobytes() == before[name].tobytes(), name
    pathlib.Path("mine/rollbacks.json").write_text("[]")
    assert run(*options, "--config.train.steps=31")[0] == 2
