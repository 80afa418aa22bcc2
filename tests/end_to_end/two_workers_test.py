"""A run of two workers decides, evaluates and exports what one process does."""

import contextlib
import json

import numpy as np
import pytest
import tensorflow as tf

from ctl import main
from ctl.hardware import cluster
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support import child, experiments

# Score is a function of the step, so that it is known when the run ends: it rises up to step 4. The
# last row of step 9 is NaN, which only worker 1 has. Each process would read every second example if
# it got the context of its own pipeline. The step, a hook and an action of every process use tf.summary.
EXPERIMENT = """\
import numpy as np
import tensorflow as tf
import tf_keras
import ctl

X = np.random.default_rng(0).normal(size=(50, 4))
LABEL = (X[:, 0] > 0).astype(np.int32)


class Score(tf_keras.metrics.Metric):
    step = None

    def update_state(self, *_, **__):
        pass

    def result(self):
        return -tf.abs(tf.cast(Score.step, tf.float32) - 4.0)


class Hello(ctl.Action):
    everywhere = True
    may_stop = False

    def __call__(self, outputs):
        tf.summary.scalar("hello", outputs["score"])


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        dense = layers.Dense(8, input_shape=(4,))
        return tf_keras.Sequential([dense, layers.Dropout(0.3), layers.Dense(3)])

    def build_dataset(self, split, input_context):
        dataset = tf.data.Dataset.from_tensor_slices({"x": X, "label": LABEL})
        return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def build_actions(self):
        return [Hello()]

    def build_metrics(self):
        # Called again for the evaluation, when the variable exists.
        Score.step = getattr(self, "global_step", None)
        return {"score": Score()}

    def forward(self, batch, training):
        x = batch["x"]
        if training:
            labels = ctl.replica.all_gather(tf.cast(batch["label"], x.dtype))
            x += 0.1 * tf.gather(labels, ctl.random.permutation_of_batch())[:, None]
            rows = ctl.replica.current()
            row = tf.range(tf.shape(x)[0]) + tf.cast(rows.first_row, tf.int32)
            bad = tf.logical_and(row == 6, tf.equal(rows.step, 9))
            x = tf.where(bad[:, None], tf.constant(np.nan, x.dtype), x)
        return self.model(x, training=training)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)

    def replica_step(self, batch):
        tf.summary.scalar("rows", tf.shape(batch["x"])[0])
        return super().replica_step(batch)


def get_config():
    return ctl.config(
        trainer="experiment.py:Trainer", data=dict(global_batch_size=7),
        runtime=dict(precision="float64"), optimizer=dict(ema_decay=0.9),
        eval=dict(interval=4, global_batch_size=7),
        train=dict(
            steps=60, steps_per_loop=4, checkpoint_interval=8, checkpoint_writing="blocking",
            on_non_finite="rollback", export="best",
            best=dict(metric="eval/score", mode="max", patience=2, restore=True)))
"""


@pytest.mark.slow
def test_two_workers_stop_roll_back_and_export_as_one_process_does(
    tmp_path, monkeypatch, capfd, run_launcher
):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": EXPERIMENT})
    run = ["--config=experiment.py"]
    assert main.run(["ctl", *run, "--workdir=one"]) == 0
    code, out, err = run_launcher(["-m", "ctl.launch", "--workers=2", "--", *run, "--workdir=two"])
    assert code == 0, out + err
    check_events(out)
    check_weights()
    check_export()
    capfd.readouterr()
    assert main.run(["ctl", *run, "--workdir=two"]) == 0
    assert "This run is complete: it ended at step 12" in capfd.readouterr().out


def check_events(printed):
    """Both runs have rolled back to step 8, and stopped at step 12; only the chief prints."""
    events = experiments.read_events("two")
    # A thread of the run in one process records a checkpoint when it is complete.
    assert sorted(events) == sorted(experiments.read_events("one"))
    assert {("non_finite", 9), ("rollback", 8), ("export", 4), ("end", 12)} <= set(events)
    for line in ("Step 9 is not finite: ", "Training ends at step 12", "Exported ", "Done:"):
        assert printed.count(line) == 1
    with open("two/metrics.jsonl") as file:  # every worker's times, from which slow ones are named
        times = {name for name in json.loads(next(file)) if name.startswith("workers/")}
    kinds, workers = ("computing", "waiting", "input"), ("worker 0", "worker 1")
    assert times == {f"workers/{kind}_seconds/{worker}" for kind in kinds for worker in workers}
    one, two = map(experiments.read_result, ("one", "two"))
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert two["stopped"] == one["stopped"] and one["stopped"]["step"] == 12
    assert two["best"]["step"] == one["best"]["step"] == 4
    assert two["eval"] == pytest.approx(one["eval"], abs=1e-10) and two["eval"]["examples"] == 50


def check_weights():
    assert CheckpointFiles("two/best").steps() == [4]
    for step in (8, 12):
        one, two = (CheckpointFiles(f"{run}/checkpoints").notes(step) for run in ("one", "two"))
        assert one["actions"] == two["actions"]
        assert one["actions"]["EarlyStopping"]["best_step"] == 4
    experiments.check_same(*map(experiments.read_weights, ("two", "one")), tolerance=1e-10)


def check_export():
    """The averaged weights of the best evaluation are exported, with its loss."""
    with open("two/export/4/export.json") as file:
        assert json.load(file)["weights"] == "average"
    x = np.random.default_rng(0).normal(size=(50, 4))
    signature = tf.saved_model.load("two/export/4").signatures["serving_default"]
    (logits,) = signature(x=tf.constant(x)).values()
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits((x[:, 0] > 0).astype(int), logits)
    assert np.mean(loss) == pytest.approx(experiments.read_result("two")["eval"]["loss"], abs=1e-9)


WITHOUT_WAIT = """
import sys
from ctl import main
from ctl.loop import lock

lock._SHARED_SECONDS = 1.0
sys.exit(main.run(["ctl", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_processes_without_a_shared_disk_are_rejected_before_training(tmp_path):
    tasks = cluster.make_local_clusters(workers=2, servers=0, ports=child.find_free_ports(2))
    with contextlib.ExitStack() as stack:
        started = []
        for i, task in enumerate(tasks):
            experiments.write(tmp_path, {f"{i}/experiment.py": experiments.DROPOUT})
            command = ["-c", WITHOUT_WAIT, "experiment.py", "--workdir=run"]
            variables = {"cwd": tmp_path / str(i), "TF_CONFIG": task.tf_config()}
            started.append(child.start(command, fork=True, **variables))
            stack.callback(started[-1].kill)
        _, err = started[0].communicate(timeout=120)
    assert started[0].returncode == 2
    assert err.endswith(
        "ctl: run is not the same folder in every process, since worker 1 on localhost cannot read "
        "what the chief has written there: name a --workdir on a disk that all of them share.\n"
    )
    assert not list(tmp_path.rglob("config.json"))
