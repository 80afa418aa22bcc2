"""Makes the TrainerFactory of an experiment that is correct except for the methods a test plants."""

import pathlib
import textwrap

from ctl.configs import loading
from ctl.modes import experiment
from ctl.modes.check.trainer_factory import TrainerFactory

CORRECT = """
import numpy as np
import tensorflow as tf
import tf_keras
import ctl

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 4)).astype(np.float32)
LABEL = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0)


class Correct(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([
            layers.Dense(16, activation="relu", name="first"),
            layers.Dropout(0.1),
            layers.Dense(3, name="last")])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": LABEL})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)


def get_config():
    return ctl.config(
        trainer="experiment.py:Planted", data=dict(global_batch_size=8),
        optimizer=dict(learning_rate=0.03))
"""

USER_EXPERIMENT = """
import ctl

def get_config():
    return ctl.config(
        trainer="user_trainers.py:{name}", data=dict(global_batch_size=8),
        optimizer=dict(learning_rate=0.03))
"""

NO_GRADIENT = """
def per_example_loss(self, batch, outputs):
    return tf.stop_gradient(super().per_example_loss(batch, outputs))
"""


TWO_REPLICAS = {"runtime.strategy": "mirrored", "runtime.logical_devices": 2}


def write_experiment(folder: pathlib.Path, body: str = "pass") -> None:
    """Writes experiment.py, whose trainer `Planted` overrides the methods in `body`."""
    planted = f"\n\nclass Planted(Correct):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    (folder / "experiment.py").write_text(CORRECT + planted)


def make_factory(folder: pathlib.Path, body: str = "pass", **keys: object) -> TrainerFactory:
    """Writes the experiment to `folder`, the current one, and builds it with config keys set."""
    write_experiment(folder, body)
    config = loading.load_config("experiment.py")
    config.update_from_flattened_dict(keys)
    built = experiment.build(config, "experiment.py", evaluates=True)
    return TrainerFactory(built, "experiment.py")


def make_user_factory(folder: pathlib.Path, name: str, **keys: object) -> TrainerFactory:
    """Writes an experiment of a trainer of `user_trainers.py` to `folder`, the current one."""
    path = write_user_experiment(folder, name)
    config = loading.load_config(path)
    config.update_from_flattened_dict(keys)
    return TrainerFactory(experiment.build(config, path, evaluates=True), path)


def write_user_experiment(folder: pathlib.Path, name: str) -> str:
    """Writes user_experiment.py, whose trainer is a class of `user_trainers.py`; returns its path."""
    source = pathlib.Path(__file__).with_name("user_trainers.py")
    (folder / "user_trainers.py").write_text(source.read_text())
    (folder / "user_experiment.py").write_text(USER_EXPERIMENT.format(name=name))
    return "user_experiment.py"
