"""The examples and initial weights of the workloads, which all frameworks get as files.

The data are MNIST, the source of Python's standard library, and synthetic ones.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import pathlib

import numpy as np

from benchmarks.models import MODELS
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


def _mnist_shapes() -> dict[str, tuple[int, ...]]:
    return {
        **_layer("conv1", 3, 3, 1, 32),
        **_layer("conv2", 3, 3, 32, 64),
        **_layer("dense1", 1600, 128),
        **_layer("dense2", 128, 10),
    }


def _char_lm_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "tokens/embeddings": (256, 128),
        "positions/embeddings": (64, 128),
    }
    for i in range(4):
        attention = f"block{i}_attention"
        for part in ("query", "key", "value"):
            shapes[f"{attention}/{part}/kernel"] = (128, 4, 32)
            shapes[f"{attention}/{part}/bias"] = (4, 32)
        shapes[f"{attention}/attention_output/kernel"] = (4, 32, 128)
        shapes[f"{attention}/attention_output/bias"] = (128,)
        shapes |= _norm(f"block{i}_norm1", 128) | _norm(f"block{i}_norm2", 128)
        shapes |= _layer(f"block{i}_wide", 128, 512) | _layer(f"block{i}_narrow", 512, 128)
    return shapes | _norm("norm", 128)


def _resnet18_shapes() -> dict[str, tuple[int, ...]]:
    shapes = _convolution("stem", 3, 3, 64)
    channels = 64
    for i, filters in enumerate((64, 64, 128, 128, 256, 256, 512, 512)):
        shapes |= _convolution(f"block{i}_first", 3, channels, filters)
        shapes |= _convolution(f"block{i}_second", 3, filters, filters)
        if filters != channels:
            shapes |= _convolution(f"block{i}_shortcut", 1, channels, filters)
        channels = filters
    return shapes | _layer("output", 512, 10)


def _two_tower_shapes() -> dict[str, tuple[int, ...]]:
    return {"users/embeddings": (_ROWS, 16), "items/embeddings": (_ROWS, 16)}


def _layer(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/gamma": (size,), f"{name}/beta": (size,)}


def _convolution(name: str, size: int, channels: int, filters: int) -> dict[str, tuple[int, ...]]:
    kernel = {f"{name}_conv/kernel": (size, size, channels, filters)}
    return kernel | _norm(f"{name}_norm", filters)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        examples: makes the arrays of examples.
        shapes: makes the shapes of the weights by the names of Keras.
        batch: examples per step.
        steps_per_loop: steps per call from Python.
        check_steps: steps of each of the four losses that are compared.
        dropout: the rate of dropout.
    """

    examples: Callable[[], Mapping[str, np.ndarray]]
    shapes: Callable[[], dict[str, tuple[int, ...]]]
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
        draw = np.random.default_rng(0)
        weights = {name: _initialize(name, shape, draw) for name, shape in self.shapes().items()}
        np.savez(folder / "weights.npz", **weights)


def _initialize(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Returns ones, zeros, or normal numbers of variance 2 / (inputs + outputs) (Glorot)."""
    if name.endswith("/gamma"):
        return np.ones(shape, np.float32)
    if name.endswith(("/beta", "/bias")):
        return np.zeros(shape, np.float32)
    if name.endswith("/embeddings"):
        scale = 0.05
    else:
        outputs = math.prod(shape[1:]) if "attention" in name else shape[-1]
        inputs = math.prod(shape) // outputs
        scale = math.sqrt(2 / (inputs + outputs))
    return scale * draw.standard_normal(shape, np.float32)


WORKLOADS = {
    "mnist": Workload(mnist, _mnist_shapes, batch=64, steps_per_loop=25, dropout=0.5),
    "char_lm": Workload(char_lm_blocks, _char_lm_shapes, batch=12, steps_per_loop=10),
    "resnet18": Workload(images, _resnet18_shapes, batch=32, steps_per_loop=2, check_steps=2),
    "two_tower": Workload(pairs, _two_tower_shapes, batch=1024, steps_per_loop=100),
}
