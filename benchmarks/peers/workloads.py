"""The examples and initial weights of the workloads, which all frameworks get as files.

The data are MNIST, the source of Python's standard library, and synthetic ones.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any

import numpy as np
import tf_keras

from benchmarks.models import MODELS
from benchmarks.peers import keras_models
from experiments.trainers import char_lm, two_tower

_ROWS = 1_000_000  # of each embedding of two_tower

Arrays = dict[str, np.ndarray]


def mnist() -> Arrays:
    images, labels = MODELS["mnist64"].arrays()
    return {"x": images, "label": labels}


def char_lm_blocks() -> Arrays:
    """The blocks of experiments/char_lm.py."""
    text = char_lm.read_text("")
    count = min(20_000, (len(text) - 1) // 64)
    x, label = (text[i : i + count * 64].reshape(count, 64).astype(np.int32) for i in (0, 1))
    return {"x": x, "label": label}


def images() -> Arrays:
    """Noise with a bright row that depends on the class."""
    draw = np.random.default_rng(0)
    label = draw.integers(10, size=2000, dtype=np.int32)
    x = draw.integers(128, size=[2000, 32, 32, 3], dtype=np.uint8)
    x[np.arange(len(x)), label] += 127
    return {"x": x, "label": label}


def pairs() -> Arrays:
    """The interactions of experiments/two_tower.py, with a million users and a million items."""
    return two_tower.draw_interactions(*two_tower.make_factors(_ROWS, _ROWS), 204_800, seed=1)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        model: makes the model with tf_keras, whose initial weights all frameworks get.
        examples: makes the arrays of examples.
        batch: examples per step.
        steps_per_loop: steps per call from Python.
        check_steps: steps of each of the four losses that are compared.
        dropout: the rate of dropout.
    """

    model: Callable[[Any, Any], tf_keras.Model]
    examples: Callable[[], Mapping[str, np.ndarray]]
    batch: int
    steps_per_loop: int
    check_steps: int = 5
    dropout: float = 0.0

    def write(self, folder: pathlib.Path) -> None:
        """Writes the examples and the weights to `data.npz` and `weights.npz`.

        The number of examples is a multiple of those of a loop, so that an epoch has only whole loops.
        """
        arrays = self.examples()
        loop = self.batch * self.steps_per_loop
        np.savez(folder / "data.npz", **{k: v[: len(v) // loop * loop] for k, v in arrays.items()})
        tf_keras.utils.set_random_seed(0)
        variables = keras_models.by_name(self.model(tf_keras, self))
        weights = {name: variable.numpy() for name, variable in variables.items()}
        np.savez(folder / "weights.npz", **weights)


WORKLOADS = {
    "mnist": Workload(keras_models.mnist, mnist, batch=64, steps_per_loop=25, dropout=0.5),
    "char_lm": Workload(keras_models.char_lm, char_lm_blocks, batch=12, steps_per_loop=10),
    "resnet18": Workload(keras_models.resnet18, images, batch=32, steps_per_loop=2, check_steps=2),
    "two_tower": Workload(keras_models.two_tower, pairs, batch=1024, steps_per_loop=100),
}
