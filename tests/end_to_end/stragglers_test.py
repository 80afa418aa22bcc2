"""A worker that the others wait for is named; the times of three processes, of which one sleeps."""

import json

import pytest

from tests import child, experiments

# A step takes at least 10 ms on every worker. From step 40 to 79 a step of worker 1 takes 60 ms more,
# and from step 120 on a batch of worker 2 takes 80 ms. The data ends with the run: TensorFlow must not
# call Python in a process that exits.
EXPERIMENT = """\
import json
import os
import time

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

WORKER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def sleep_in_step(step):
    time.sleep(0.01 + 0.06 * (WORKER == 1 and 40 <= step < 80))
    return np.float32(0)


def sleep_in_input(batch):
    time.sleep(0.08 * (WORKER == 2 and batch >= 120))
    return np.float32(batch)


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(4,))])

    def build_dataset(self, split, input_context):
        dataset = tf.data.Dataset.range(160).map(
            lambda i: tf.numpy_function(sleep_in_input, [i], tf.float32))
        rows = 6 // input_context.num_input_pipelines
        return ctl.data.PerReplica(
            dataset.map(lambda i: {"x": tf.fill([rows, 4], tf.ensure_shape(i, []) / 100)}))

    def per_example_loss(self, batch, outputs):
        zero = tf.numpy_function(sleep_in_step, [self.global_step], tf.float32)
        return tf.reduce_mean(tf.square(outputs), axis=1) + tf.ensure_shape(zero, [])


def get_config():
    return ctl.config(
        trainer="slow.py:Trainer", data=dict(global_batch_size=6), eval=dict(splits=[]),
        train=dict(steps=160, steps_per_loop=5, checkpoint_interval=160),
        runtime=dict(allow_unkeyed_random=True))
"""


@pytest.mark.slow
@pytest.mark.long  # three real processes, whose times depend on what else the machine does
def test_slow_worker_is_named_with_its_host_and_an_even_run_names_none(tmp_path):
    experiments.write(tmp_path, {"slow.py": EXPERIMENT})
    arguments = [f"--config={tmp_path / 'slow.py'}", f"--workdir={tmp_path / 'run'}"]
    done = child.run(["-m", "ctl.launch", "--workers=3", "--", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    slow = [e for e in events if e["event"].startswith("straggler")]
    # Worker 2 may be named before the recovery of worker 1 is known.
    step, end, input_ = sorted(slow, key=lambda e: e["worker"])
    assert [(e["event"], e["worker"]) for e in (step, end, input_)] == [
        ("straggler", "worker 1"), ("straggler_ended", "worker 1"), ("straggler", "worker 2"),
    ], slow  # fmt: skip
    # A recovery takes two measurements of a second, too.
    assert 40 < step["step"] <= 85 < end["step"] and input_["step"] > 120
    assert step["host"] == "localhost"
    assert step["computing"] > 2 * step["median"] and step["input"] < 0.1 * step["computing"]
    assert input_["input"] > 2 * input_["median"]
    assert "worker 1 on localhost is slow, and the other workers wait for it" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    times = {record["step"]: record for record in records if record["split"] == "train"}[70]
    # 5 steps of 10 ms, and of 60 ms more for worker 1, for which the others wait.
    assert times["workers/computing_seconds/worker 1"] > 0.35
    assert times["workers/waiting_seconds/worker 0"] > 0.2
    assert times["workers/waiting_seconds/worker 1"] < times["workers/waiting_seconds/worker 0"] / 2
