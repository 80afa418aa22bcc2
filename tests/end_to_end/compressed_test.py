"""Compressed gradients in two processes with different CPUs."""

import pytest

from tests.support import child, experiments

# Worker 1 has no AVX-512 for oneDNN, which then chooses other kernels for products of matrices.
EXPERIMENT = """\
import hashlib
import json
import os

WORKER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if WORKER == 1:
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"

import numpy as np
import tensorflow as tf
import tf_keras

import ctl


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.Dense(512, activation="tanh", input_shape=(512,)), layers.Dense(512)])

    def build_dataset(self, split, input_context):
        random = np.random.default_rng(0)
        x, label = random.normal(size=(2, 64, 512)).astype("float32")
        return ctl.data.arrays({"x": x, "label": label})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(outputs - batch["label"]), axis=1)

    def train_loop_end(self):
        weights = b"".join(v.numpy().tobytes() for v in self.model.variables)
        with open(f"{self.options.model.hashes}-{WORKER}", "a") as file:
            print(int(self.global_step.numpy()), hashlib.md5(weights).hexdigest(), file=file)
        return super().train_loop_end()


def get_config():
    return ctl.config(
        trainer="compressed.py:Trainer", model=dict(hashes=""), data=dict(global_batch_size=8),
        eval=dict(splits=[]), optimizer=dict(name="adamw", learning_rate=1e-3),
        train=dict(steps=10, steps_per_loop=5),
        runtime=dict(all_reduce=dict(compression="powersgd", rank=2)))
"""


@pytest.mark.slow
def test_weights_of_different_cpus_have_the_same_bits(tmp_path):
    experiments.write(tmp_path, {"compressed.py": EXPERIMENT})

    workdir = tmp_path / "run"
    command = ["-m", "ctl.launch", "--workers=2", "--", f"--config={tmp_path / 'compressed.py'}"]
    command += [f"--workdir={workdir}", f"--config.model.hashes={tmp_path / 'hashes'}"]
    done = child.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, others = ((tmp_path / f"hashes-{i}").read_text().splitlines() for i in (0, 1))
    assert [line.split()[0] for line in lines] == ["5", "10"] and lines == others
