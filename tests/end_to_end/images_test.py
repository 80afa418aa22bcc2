"""A run on JPEG images in record files, with random crops, killed and resumed: the same bits."""

import os
import pathlib
import signal

import numpy as np
import pytest

from ctl import main
from tests import child, experiments
from tests.data import image_records

EXPERIMENT = """\
import tensorflow as tf
import tf_keras
import ctl
from tests.data import image_records


def parse(record):
    example = image_records.parse_image(record)
    return {"image": example["image"], "label": example["label"] % 3}


def augment(example, seed):
    image = tf.image.stateless_random_crop(example["image"], [8, 8, 3], seed)
    return {**example, "image": tf.image.stateless_random_flip_left_right(image, seed)}


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.augmented(ctl.data.records("images.tfrecord", parse), augment)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)


def get_config():
    return ctl.config(
        trainer="experiment.py:Trainer", data=dict(global_batch_size=7), eval=dict(splits=[]),
        train=dict(steps=20, steps_per_loop=5, checkpoint_interval=10))
"""


@pytest.mark.slow
def test_a_killed_run_with_a_cache_has_the_bits_of_an_undisturbed_run_without_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": EXPERIMENT})
    image_records.write_images("images.tfrecord")
    run = ["--config=experiment.py", "--mode=train"]
    assert main.run(["ctl", *run, "--workdir=undisturbed"]) == 0
    run += ["--workdir=killed", "--config.data.cache=cache"]
    killed = child.run(
        ["-m", "ctl.testing.faults", "--kill=step:17", "--", *run], cwd=pathlib.Path.cwd()
    )
    assert killed.returncode == -signal.SIGKILL
    assert main.run(["ctl", *run]) == 0
    assert len([name for name in os.listdir("cache") if not name.endswith(".lock")]) == 1
    expected = experiments.read_weights("undisturbed")
    actual = experiments.read_weights("killed")
    assert expected.keys() == actual.keys() and len(expected) > 3
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
