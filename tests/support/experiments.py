"""The experiments that several tests run, as source text, and readers of what a run writes.

experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
main.run(["ctl", "--config=experiment.py", "--workdir=run"])
weights = experiments.read_weights("run", step=30)
"""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any

from tests.support import child

# A config that names its trainer in another file, and that trainer: 8 examples of 3 features.
CONFIG = """\
import ctl

def get_config():
    return ctl.config(trainer="tiny.py:Tiny", data=dict(global_batch_size=4))
"""
TRAINER = """\
import tf_keras
import ctl

class Tiny(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": [[1.0, 2.0, 3.0]] * 8, "label": [0, 1] * 4})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)

def Function():
    return None
"""

# Config and trainer in one file, experiment.py: 50 examples, dropout, 30 steps of 7 examples.
DROPOUT = """\
import numpy as np
import tf_keras
import ctl

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 4)).astype(np.float32)


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        dropout = layers.Dropout(self.options.model.dropout)
        return tf_keras.Sequential([layers.Dense(8), dropout, layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": (X[:, 0] > 0).astype(np.int32)})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def get_config():
    return ctl.config(
        trainer="experiment.py:Trainer",
        data=dict(global_batch_size=7),
        model=dict(dropout=0.3),
        train=dict(steps=30, steps_per_loop=5, checkpoint_interval=10),
        eval=dict(interval=15),
    )
"""

# The CNN of experiments/trainers/mnist.py on real images, small.py: float64, no dropout, 50 steps.
MNIST = """\
import ctl
from experiments.trainers import mnist


class Small(mnist.MnistTrainer):
    def build_dataset(self, split, input_context):
        images = ctl.data.idx(self.options.data.dir, "eval")
        return images if split == "train" else ctl.data.arrays(
            {name: value.numpy() for name, value in images.gather(list(range(203))).items()})


def get_config():
    return ctl.config(
        trainer="small.py:Small", model=dict(dropout=0.0), runtime=dict(precision="float64"),
        data=dict(dir="DIR", global_batch_size=24), eval=dict(global_batch_size=50),
        optimizer=dict(name="adam", schedule="cosine", warmup_steps=5),
        train=dict(steps=50, steps_per_loop=20))
""".replace("DIR", str(child.ROOT / "experiments/data/mnist"))


def write(folder: str | os.PathLike[str], files: Mapping[str, str | bytes]) -> None:
    """Writes files, given as relative path -> content, and the folders that they need."""
    for name, content in files.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def read_events(workdir: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """The events of a run as (event, step), in order."""
    lines = pathlib.Path(workdir, "events.jsonl").read_text().splitlines()
    return [(line["event"], line["step"]) for line in map(json.loads, lines)]


def read_result(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a run's result.json."""
    return json.loads(pathlib.Path(workdir, "result.json").read_text())


def read_notes(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """The notes in the marker of a checkpoint."""
    return json.loads(pathlib.Path(workdir, f"checkpoints/ckpt-{step}.whole").read_text())["notes"]


def read_weights(workdir: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Every variable in the checkpoint of a step, or in the newest one, as name -> array."""
    import tensorflow as tf

    folder = str(pathlib.Path(workdir, "checkpoints"))
    path = tf.train.latest_checkpoint(folder) if step is None else f"{folder}/ckpt-{step}"
    reader = tf.train.load_checkpoint(path)
    # The object graph is bytes and the save counter counts saves: neither is a result of training.
    skipped = ("OBJECT_GRAPH", "save_counter")
    names = reader.get_variable_to_shape_map()
    return {n: reader.get_tensor(n) for n in names if not any(part in n for part in skipped)}


def check_same(
    actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0
) -> None:
    """Asserts that two results of `read_weights` are equal, within an absolute tolerance."""
    import numpy as np

    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=tolerance, err_msg=name)
