"""Builds a loop on a split, sets its variables, and records what its steps compute."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import sys
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.testing.devices import make_strategy
from ctl.testing.loops.adapters import adapt
from ctl.testing.loops.protocol import Contents, Loop, LoopSplit
from ctl.testing.recording import (
    Name,
    Names,
    Record,
    aggregate_copies,
    flatten_numbers,
    record_steps,
)
from ctl.testing.splits import RATE, Split

State = list[np.ndarray]  # the value of each variable, in the order of the loop
Build = Callable[[tf.distribute.Strategy, int], Any]


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """The loop and the examples that are run on every split.

    Attributes:
        build: makes the loop for a strategy and a global batch size.
        examples: a nested structure of [examples, ...] arrays.
        mask: name of the feature that is 1 for rows and 0 for padding; "" for loops that take
            per-replica batches of different sizes.
        steps: number of training steps.
        precision: dtype of the weights and of the floating-point examples.
        plain: replace the update rule of every optimizer of Keras by plain SGD.
    """

    build: Build
    examples: Any
    mask: str
    steps: int
    precision: str = "float64"
    plain: bool = True

    def rows(self, indexes: Sequence[int]) -> Any:
        """Selects examples, and casts floating-point ones to the precision."""

        def select(values: np.ndarray) -> np.ndarray:
            selected = np.asarray(values)[np.asarray(indexes, int)]
            return selected.astype(self.precision) if selected.dtype.kind == "f" else selected

        return tf.nest.map_structure(select, self.examples)

    def batch(self, size: int, step: int) -> list[int]:
        """Returns the indexes of the global batch of a step."""
        count = len(tf.nest.flatten(self.examples)[0])
        return [(step * size + i) % count for i in range(size)]


class LoopRun:
    """Builds a loop for a split, and trains one step, which creates all variables.

    Args:
        spec: what to run.
        split: how the global batch is split.
        seed: seed of the random numbers.

    Raises:
        UsageError: `build` returned no loop.
    """

    def __init__(self, spec: LoopSpec, split: Split, *, seed: int = 0):
        self.spec, self.split = spec, split
        self.strategy = make_strategy(split.replicas)
        with _configure_keras(spec.precision):
            _set_seeds(seed)
            self.loop: Loop = adapt(spec.build(self.strategy, split.batch))
            self.contents = Contents(self.loop.variables)
            if spec.plain:
                for optimizer in self.contents.optimizers:
                    _use_plain_sgd(optimizer)
            # A model without input shape, and some optimizers, create variables in the first step.
            # In Keras 3 the first step of `fit` fails on an uneven batch, which in training comes last.
            even = split.rows_per_replica * split.replicas
            self.train(spec.batch(split.batch if self.loop.distributed else even, 0))

    @property
    def precision(self) -> str:
        """The dtype with the fewest digits among the weights."""
        named = self.contents.name_variables()
        dtypes = [v.dtype.name for (kind, _), v in named.items() if kind == "update"]
        if not dtypes:
            raise UsageError(
                "The variables of the loop contain no trainable variable: list its model."
            )
        return "float64" if all(dtype == "float64" for dtype in dtypes) else "float32"

    def state(self) -> State:
        """Returns the value of each variable."""
        named = self.contents.name_variables()
        return [aggregate_copies(self.strategy, variable) for variable in named.values()]

    def set_state(self, state: State, *, floating_only: bool = False) -> None:
        """Assigns the values of the same loop on another split, and resets the metrics.

        Args:
            state: a value for each variable.
            floating_only: keep the integers, such as the states of random generators.

        Raises:
            UsageError: the loop has other variables on this split.
        """
        named = self.contents.name_variables()
        shapes = [tuple(variable.shape) for variable in named.values()]
        if shapes != [value.shape for value in state]:
            raise UsageError(
                f"The loop has {len(shapes)} variables on {self.split}, but {len(state)} on one "
                "replica, or others: build must create the same variables on every number of replicas."
            )
        for variable, value in zip(named.values(), state, strict=True):
            if variable.dtype.is_floating or not floating_only:
                variable.assign(tf.cast(value, variable.dtype))
        for metric in self.contents.metrics:
            reset = getattr(metric, "reset_state", None) or getattr(metric, "reset_states", None)
            if reset is not None:
                reset()

    def train(self, indexes: Sequence[int]) -> dict[Name, np.ndarray]:
        """Trains one step on the examples with these indexes.

        Args:
            indexes: the rows of the global batch.

        Returns:
            The values that the step reports, and the results of the metrics.
        """
        with _configure_keras(self.spec.precision):
            outputs = self.loop.step(self._distribute(indexes))
        values: dict[Name, np.ndarray] = {}
        for name, value in _read_outputs(outputs):
            values["loss" if name == "loss" else "metric", name] = value
        for metric in self.contents.metrics:
            for own_name, value in flatten_numbers({metric.name: metric.result()}):
                name, count = own_name, 2
                while ("metric", name) in values:
                    name, count = f"{own_name}#{count}", count + 1
                values["metric", name] = value
        return values

    def record(self, state: State, names: Sequence[Names] = (), *, order: Any = None) -> Record:
        """Sets the state, trains the steps of the spec, and records all quantities.

        Args:
            state: the state before the first step.
            names: `Record.names` of the same loop on another split, used instead of its own names.
            order: a permutation of the rows of each global batch.
        """
        self.set_state(state)

        def train(step: int) -> dict[Name, np.ndarray]:
            indexes = np.asarray(self.spec.batch(self.split.batch, step))
            return self.train(list(indexes if order is None else indexes[order]))

        def name_variables() -> dict[Name, tf.Variable]:
            named = self.contents.name_variables()
            for stage in names:
                if [kind for kind, _ in stage] == [kind for kind, _ in named]:
                    return dict(zip(stage, named.values(), strict=True))
            return named

        steps = self.spec.steps
        return record_steps(self.strategy, self.split, train, name_variables, steps=steps)

    def _distribute(self, indexes: Sequence[int]) -> Any:
        """Splits rows over the replicas as the strategy's datasets split a partial batch."""
        if not self.loop.distributed:
            return self.spec.rows(indexes)
        split = LoopSplit(len(indexes), self.split.replicas)
        rows = split.rows_per_replica
        shares = []
        for replica, count in enumerate(split.row_counts):
            share = list(indexes[replica * rows :][:count])
            if self.spec.mask:
                share += [indexes[-1]] * (rows - count)
            values = self.spec.rows(share)
            if self.spec.mask:
                present = (np.arange(rows) < count).astype(self.spec.precision)
                values = {**values, self.spec.mask: present}
            shares.append(values)

        def select(*leaves: np.ndarray) -> Any:
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(leaves[context.replica_id_in_sync_group])
            )

        return tf.nest.map_structure(select, *shares)


def _read_outputs(outputs: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the names and values of what a step returns.

    Raises:
        UsageError: the output is neither a number, nor a dict of numbers, nor None.
    """
    if outputs is None:
        return []
    for value in tf.nest.flatten(outputs):
        local = isinstance(value, tf.distribute.DistributedValues)
        if local and not isinstance(value, tf.Variable):
            raise UsageError(
                "The step returns one value per replica (of strategy.run), but must return the loss of "
                'the global batch: return strategy.reduce("SUM", losses, axis=None).'
            )
    if isinstance(outputs, dict):
        return list(flatten_numbers(outputs))
    values = list(flatten_numbers({"loss": outputs}))
    if isinstance(outputs, list | tuple) or not values:
        raise UsageError(
            f"The step returns a {type(outputs).__name__}, but must return the loss, a dict of numbers, "
            "or None: name several values in a dict."
        )
    return values


def _use_plain_sgd(optimizer: Any) -> None:
    """Replaces the update rule, and keeps what the optimizer does to the gradients before it.

    Adam's first update hardly depends on the size of the gradient.
    """

    def update_step(gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        variable.assign_sub(RATE * tf.cast(tf.convert_to_tensor(gradient), variable.dtype))

    if hasattr(optimizer, "update_step") and not hasattr(optimizer, "inner_optimizer"):
        optimizer.update_step = update_step


def _set_seeds(seed: int) -> None:
    tf_keras.utils.set_random_seed(seed)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(seed)


@contextlib.contextmanager
def _configure_keras(precision: str) -> Iterator[None]:
    """Sets the default dtype of both versions of Keras that are loaded."""
    backends = [tf_keras.backend]
    if "keras" in sys.modules:  # version 3, even if it is used as tf.keras
        backends.append(sys.modules["keras"].config)
    before = [backend.floatx() for backend in backends]
    tf_keras.backend.reset_uids()  # layers without a name of their own are numbered by process
    try:
        for backend in backends:
            backend.set_floatx(precision)
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.set_floatx(value)
