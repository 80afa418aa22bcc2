"""What the program of every framework receives, and how it reports. It imports no framework."""

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
import sys

import numpy as np

from benchmarks import windows

CHECK_LOOPS = 4  # of a check of the losses


@dataclasses.dataclass(frozen=True)
class Task:
    """A workload, as a program reads it from its folder.

    Attributes:
        name: name of the workload.
        batch: examples per step.
        steps_per_loop: steps between two calls of `tick`.
        dropout: the rate of dropout, 0 in a check.
        check: train on one batch in the order of the arrays, so that the losses can be compared.
        folder: where `data.npz` and `weights.npz` are.
    """

    name: str
    batch: int
    steps_per_loop: int
    dropout: float
    check: bool
    folder: pathlib.Path

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The examples: `x` and `label`, or `user` and `item`.

        In a check they are the first batch, for each of the steps. Its loss falls in every workload.
        """
        arrays = dict(np.load(self.folder / "data.npz"))
        if self.check:
            steps = self.steps_per_loop * CHECK_LOOPS
            arrays = {k: np.concatenate([v[: self.batch]] * steps) for k, v in arrays.items()}
        return arrays

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights by the names of Keras, such as "conv1/kernel", in the layout of Keras."""
        return dict(np.load(self.folder / "weights.npz"))

    def floats(self) -> dict[str, np.ndarray]:
        """Returns the examples with pixels as float32, converted in advance."""
        return {
            name: array / np.float32(255) if array.dtype == np.uint8 else array
            for name, array in self.arrays.items()
        }


class Losses:
    """Stands in for `Windows` in a check: records the mean loss of each loop."""

    def __init__(self):
        self.sync: Callable[[], float] = lambda: 0.0
        self.values: list[float] = []

    def __call__(self, steps: int) -> None:
        self.values.append(float(self.sync()))
        if len(self.values) == CHECK_LOOPS:
            raise windows.Done


def run(train: Callable) -> None:
    """Runs a program: `python -m MODULE [VARIANT] TASK`, where TASK is the JSON of a task.

    Args:
        train: a function (task, tick, *variant) that trains endlessly and calls `tick(steps)` after each
            loop. It sets `tick.sync` to a function that returns the mean loss since its last call.
    """
    *variant, text = sys.argv[1:]
    task = json.loads(text)
    task = Task(**task | {"folder": pathlib.Path(task["folder"])})
    if not task.check:
        windows.serve(lambda tick: train(task, tick, *variant))
        return
    losses = Losses()
    with windows.answers_only() as answers:
        try:
            train(task, losses, *variant)
        except windows.Done:
            print(json.dumps(losses.values), file=answers)
