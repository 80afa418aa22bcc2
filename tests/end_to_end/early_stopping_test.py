"""Early stopping and the best checkpoint of complete programs, on two workers and through SIGKILLs."""

import json
import signal

import numpy as np
import pytest

from ctl import main
from ctl.loop.checkpoints.files import CheckpointFiles
from tests import child, experiments

# A metric that is a function of the step, so that it is known when the run ends: it rises up to step
# 12. The step, a hook and an action of every process use tf.summary.
EXPERIMENT = (
    experiments.DROPOUT.replace(
        "class Trainer(ctl.StandardTrainer):",
        """\
import tensorflow as tf

class Score(tf_keras.metrics.Metric):
    step = None

    def update_state(self, *_, **__):
        pass

    def result(self):
        return -tf.abs(tf.cast(Score.step, tf.float32) - 12.0)


class Hello(ctl.Action):
    everywhere = True
    may_stop = False

    def __call__(self, outputs):
        tf.summary.scalar("hello", outputs["score"])


class Trainer(ctl.StandardTrainer):
    def build_actions(self):
        return [Hello()]

    def build_metrics(self):
        # Called again for the evaluation, when the variable exists.
        Score.step = getattr(self, "global_step", None)
        return {"score": Score()}

    def replica_step(self, batch):
        tf.summary.scalar("rows", tf.shape(batch["x"])[0])
        return super().replica_step(batch)
""",
    )
    .replace("def build_metrics", "def unused", 2)
    .replace("def unused", "def build_metrics", 1)
    .replace("train=dict(steps=30, steps_per_loop=5, checkpoint_interval=10),", """\
runtime=dict(precision="float64"),
        train=dict(
            steps=60, steps_per_loop=4, checkpoint_interval=8, checkpoint_writing="blocking",
            early_stopping=dict(metric="eval/score", mode="max", patience=3, restore_best=True)),""")
    .replace("eval=dict(interval=15)", "eval=dict(interval=4, global_batch_size=7)")
)  # fmt: skip
RUN = ["--config=experiment.py"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with the experiment, and its run `one` in one process."""
    folder = tmp_path_factory.mktemp("early_stopping")
    experiments.write(folder, {"experiment.py": EXPERIMENT})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main.run(["ctl", *RUN, "--workdir=one"]) == 0
    return folder


def check_same(folder, name, *, tolerance):
    one, other = (experiments.read_result(folder / run) for run in ("one", name))
    assert other["stopped"] == one["stopped"] and one["stopped"]["step"] == 24
    assert other["best"]["step"] == one["best"]["step"] == 12
    assert other["eval"]["loss"] == pytest.approx(one["eval"]["loss"], abs=tolerance)
    assert CheckpointFiles(folder / name / "best").steps() == [12]
    for step in (16, 24):
        notes = [CheckpointFiles(folder / n / "checkpoints").notes(step) for n in ("one", name)]
        assert notes[0] == notes[1] and notes[0]["actions"]["EarlyStopping"]["best_step"] == 12
    expected, actual = (experiments.read_weights(folder / run) for run in ("one", name))
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.slow
def test_killed_program_stops_at_the_same_step_with_the_same_bits(undisturbed):
    # In the second checkpoint, in the evaluation that is the best, and in one of the last steps.
    for point in ("save:2", "eval:1", "step:23"):
        command = ["-m", "ctl.testing.faults", f"--kill={point}", "--", *RUN, "--workdir=killed"]
        assert child.run(command, cwd=undisturbed).returncode == -signal.SIGKILL
    done = child.run(["-m", "ctl.main", *RUN, "--workdir=killed"], cwd=undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(undisturbed, "killed", tolerance=0)


@pytest.mark.slow
def test_two_workers_stop_at_the_step_of_one_process(undisturbed, monkeypatch, capsys):
    launch = ["-m", "ctl.launch", "--workers=2", "--", *RUN, "--workdir=two"]
    done = child.run(launch, cwd=undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(undisturbed, "two", tolerance=1e-10)
    assert done.stdout.count("Training ends at step 24") == 1
    assert experiments.read_events(undisturbed / "two") == experiments.read_events(
        undisturbed / "one"
    )
    monkeypatch.chdir(undisturbed)
    assert main.run(["ctl", *RUN, "--workdir=two"]) == 0
    assert "This run is complete: it ended at step 24" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_killed_worker_does_not_change_where_two_workers_stop(undisturbed):
    command = ["-m", "ctl.testing.faults", "--kill=step:18", "--workers=2", "--worker=1"]
    run = ["--max_restarts=1", "--", *RUN, "--workdir=worker"]
    done = child.run([*command, *run], cwd=undisturbed)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(undisturbed, "worker", tolerance=1e-10)
    lines = (undisturbed / "worker/events.jsonl").read_text().splitlines()
    assert "stop_requested" in [json.loads(line)["event"] for line in lines]
