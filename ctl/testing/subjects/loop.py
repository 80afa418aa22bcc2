"""Runs a training loop that is not ctl's: plain TensorFlow, Orbit, Keras 2 or Keras 3."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import sys
from typing import Any, ClassVar

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.configs import group_values
from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.keras import models, precision
from ctl.keras.precision import Optimizer
from ctl.step import Step
from ctl.testing.contents import Contents, Names, holders, read_all, value_of
from ctl.testing.equivalence_report import NotComparable
from ctl.testing.logical_devices import make_strategy
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import RATE, Split
from ctl.testing.subjects import noise
from ctl.testing.subjects.base import Calibration, NarrowWeights, SplitRun, Subject, Terms
from ctl.testing.subjects.traces import Traces
from ctl.update.gradients import optimizers_of

State = list[np.ndarray]  # the value of each variable, in the order of the loop
_SCALES = ("current_loss_scale", "dynamic_scale")  # in tf_keras and Keras 3
_ERROR = {"float64": 1e-5, "float32": 1e-3}  # relative, of the combination of an update


class LoopRun(SplitRun):
    """Builds a loop for a split, and trains one step, which creates all variables.

    Args:
        subject: what to run.
        split: how the global batch is split.
        seed: seed of the random numbers.

    Attributes:
        state: the state before the first step of a record.
        order: the order of the rows of each global batch.
        traces: the graphs of the step.

    Raises:
        UsageError: `build` returned no loop.
    """

    def __init__(self, subject: "LoopSubject", split: Split, *, seed: int = 0):
        super().__init__(subject, split, make_strategy(split.replicas))
        self.order = slice(None)
        self.traces = Traces(self.strategy)
        with _configure_keras(subject.precision):
            tf_keras.utils.set_random_seed(seed)
            if "keras" in sys.modules:
                sys.modules["keras"].utils.set_random_seed(seed)
            built = subject.factory(self.strategy, split.batch)
            if subject.plain and isinstance(built, Step):  # it makes those of its groups later
                groups = group_values.without(built.options.optimizer_groups, "optimizer")
                built.options = dataclasses.replace(built.options, optimizer_groups=groups)
            self.loop: Loop = adapt(built)
            self._contents = Contents(self.loop.variables)
            updated: dict[int, set[int]] = {}
            if subject.plain:
                for each in (o for own in self._contents.optimizers for o in optimizers_of(own)):
                    _use_plain_sgd(each, updated)
            # A model without input shape, and some optimizers, create variables in the first step.
            # In Keras 3 the first step of `fit` fails on an uneven batch, which in training comes last.
            even = split.rows_per_replica * split.replicas
            self.train(self._batch(split.batch if self.loop.distributed else even, 0))
        self.state = self.read_state() if subject.state is None else subject.state
        named = self.contents.name_variables().items()
        self.update_order = [[n for (_, n), v in named if id(v) in own] for own in updated.values()]

    @property
    def contents(self) -> Contents:
        """Everything that a step may change."""
        return self._contents

    def step(self, number: int) -> Any:
        """Trains the step with this number, from 0, and returns what it reports."""
        return self.train(self._batch(self.split.batch, number)[self.order])

    def train(self, indexes: Sequence[int]) -> Any:
        """Trains one step on the examples with these indexes."""
        with _configure_keras(self.subject.precision):
            return self.loop.step(self._distribute(indexes))

    def find_shared(self) -> str:
        """Returns the line that reads on a replica what another one has computed, or ""."""
        return self.traces.find_shared()

    def read_state(self) -> State:
        """Returns the value of each variable."""
        return list(read_all(self.strategy, self.contents.name_variables()).values())

    def record(
        self, names: Sequence[Names] = (), *, steps: int | None = None, evaluate: bool = False
    ) -> LoopRecord:
        """Goes back to the state before the first step, trains, and records every quantity."""
        self.set_state(self.state)
        return super().record(names, steps=steps, evaluate=evaluate)

    def set_state(self, state: State, *, floating_only: bool = False) -> None:
        """Assigns the values of the same loop on another split, and resets the metrics.

        Args:
            state: a value for each variable.
            floating_only: keep the integers, such as the states of random generators.

        Raises:
            NotComparable: the loop has other variables on this split.
        """
        named = self.contents.name_variables()
        shapes = [tuple(variable.shape) for variable in named.values()]
        if shapes != [value.shape for value in state]:
            raise NotComparable(
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

    def has_narrow_weights(self) -> bool:
        """Returns whether a weight has fewer digits than float64."""
        named = self.contents.name_variables()
        dtypes = [v.dtype for (kind, _), v in named.items() if kind == "update"]
        if not dtypes:
            raise UsageError(
                "The variables of the loop contain no trainable variable: list its model."
            )
        return any(dtype != tf.float64 for dtype in dtypes)

    def _batch(self, size: int, step: int) -> list[int]:
        """Returns the indexes of the global batch of a step."""
        return [(step * size + i) % self.subject.count for i in range(size)]

    def _distribute(self, indexes: Sequence[int]) -> Any:
        """Splits rows over the replicas as the strategy's datasets split a partial batch."""
        if not self.loop.distributed:
            return self.subject.select(indexes).examples
        split, mask = Split(len(indexes), self.split.replicas), self.subject.mask
        shares = []
        for share in split.shares(indexes):
            count = len(share)
            if mask:
                share += [indexes[-1]] * (split.rows_per_replica - count)
            values = self.subject.select(share).examples
            if mask:
                present = np.arange(split.rows_per_replica) < count
                values = {**values, mask: present.astype(self.subject.precision)}
            shares.append(values)

        def place(*leaves: np.ndarray) -> Any:
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(leaves[context.replica_id_in_sync_group])
            )

        return tf.nest.map_structure(place, *shares)


@dataclasses.dataclass(frozen=True)
class LoopSubject(Subject):
    """A loop, which `factory(strategy, global_batch_size)` builds.

    Attributes:
        mask: name of the feature that is 1 for rows and 0 for padding; "" for loops that take
            per-replica batches of different sizes.
        state: the variables before the first step; None for those that the loop is built with.
    """

    mask: str = ""
    state: State | None = None
    scales_losses: ClassVar[bool] = True

    @property
    def pads_rows(self) -> bool:
        """Whether every replica gets the same number of rows."""
        return bool(self.mask)

    def start(self, split: Split) -> LoopRun:
        """Builds the loop for a split."""
        run = LoopRun(self, split)
        if run.has_narrow_weights() and self.precision == "float64":
            # `build` may have imported the version of Keras whose default dtype was not set.
            run = LoopRun(self, split)
            if run.has_narrow_weights():
                raise NarrowWeights("its weights are float32")
        return run

    def with_state_of(self, run: SplitRun) -> "LoopSubject":
        """Returns the same, whose runs start with the variables of a run."""
        return dataclasses.replace(self, state=run.state)  # type: ignore[attr-defined]

    def with_own_optimizers(self) -> "LoopSubject":
        """Returns the same with its own optimizers, and with their slots."""
        return dataclasses.replace(self, plain=False, state=None)

    def calibrate(self, run: SplitRun, record: LoopRecord) -> Calibration:
        """Measures the effect of the order of the rows, and of random numbers."""
        assert isinstance(run, LoopRun)
        return noise.calibrate(run, record)

    def find_narrow(self, run: SplitRun) -> str:
        """Names the line of a cast to float64 of what the step computes in fewer digits."""
        assert isinstance(run, LoopRun)
        return noise.find_cast(run.traces.graphs)

    def measure_tolerance(self, run: SplitRun, record: LoopRecord) -> float:
        """Returns a multiple of what another order of the rows changes."""
        assert isinstance(run, LoopRun)
        return noise.MARGIN * noise.measure_noise(run, record)

    def terms(self, batch: int, names: Any) -> Terms:
        """Returns the updates of each row alone, with a global batch size of 1, and the weights.

        Under plain SGD the update of a batch on one replica is the mean of the rows' updates, unless
        the rows depend on each other, as with batch normalization.
        """
        run = self.start(Split(1))
        named = {n: v for n, v in run.contents.name_variables(names).items() if n[0] == "update"}
        first = next(iter(run.update_order), [])  # later updates follow from it
        own = dict(
            zip(run.contents.name_variables(), run.contents.name_variables(names), strict=True)
        )
        chosen = [own["update", n] for n in first if ("update", n) in own] or list(named)

        def weights() -> list[np.ndarray]:
            return [np.asarray(named[n], np.float64).ravel() for n in chosen]

        run.set_state(run.state)
        before, columns = weights(), []
        for row in range(batch):
            run.set_state(run.state)
            run.train([row])
            columns.append(np.concatenate(weights()) - np.concatenate(before))
        places = np.repeat(np.arange(len(before)), [len(value) for value in before])
        by_variable = np.concatenate(before)[:, np.newaxis] * (
            places[:, np.newaxis] == range(len(before))
        )
        rows = np.stack(columns, axis=1)
        zeros = np.zeros([len(rows), 0])
        return Terms(rows, zeros, by_variable, tuple(chosen), _ERROR[self.precision])

    def scaled_records(
        self, run: SplitRun, scale: float
    ) -> tuple[LoopRecord, LoopRecord, float] | None:
        """Makes the steps under the loss scale of the loop, and under a larger one."""
        assert isinstance(run, LoopRun)
        names = [name for _, name in run.contents.name_variables()]
        scales = [any(scale_name in name for scale_name in _SCALES) for name in names]
        if not any(scales):
            return None
        scaled = [v * scale if s else v for v, s in zip(run.state, scales, strict=True)]
        plain, other = (
            dataclasses.replace(self, state=state).start(run.split).record()
            for state in (run.state, scaled)
        )
        return plain, other, 0.0


def _use_plain_sgd(optimizer: Optimizer, updated: dict[int, set[int]]) -> None:
    """Replaces the update rule, and keeps what the optimizer does to the gradients before it.

    Adam's first update hardly depends on the size of the gradient.

    Args:
        optimizer: the optimizer.
        updated: gets the variables of each optimizer, in the order of their updates.
    """

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any = None) -> None:
        own = updated.setdefault(id(optimizer), set())
        own.add(id(value_of(variable)))
        variable.assign_sub(RATE * tf.cast(tf.convert_to_tensor(gradient), variable.dtype))

    if hasattr(optimizer, "update_step"):
        optimizer.update_step = update_step


@contextlib.contextmanager
def _configure_keras(floatx: str) -> Iterator[None]:
    """Sets the default dtype of both versions of Keras that are loaded."""
    models.reset_names()  # layers without a name of their own are numbered by process
    with precision.floatx_scope(floatx):
        yield


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop: its step, and everything that the step may change.

        def build(strategy, global_batch_size):
            with strategy.scope():
                model, optimizer = make_model(), tf_keras.optimizers.Adam()

            @tf.function
            def step(batch):
                losses = strategy.run(replica_step, args=(batch,))
                return strategy.reduce("SUM", losses, axis=None)

            return ctl.testing.Loop(step, [model, optimizer])

    Any other object with a method `step` and an attribute `variables` is a loop, too.

    Attributes:
        step: takes a global batch, distributed over the replicas as the strategy's datasets
            distribute it, trains one step, and returns the loss, a dict of numbers, or None. An
            evaluation step may be compared in the same way.
        variables: models, layers, optimizers, metrics, variables, and `ctl.Step`s. The comparison needs
            the optimizers to recognize a factor of the gradients, which Adam hides.
        distributed: False if `step` takes the rows of the global batch as arrays, and distributes
            them itself.
    """

    step: Callable[[Any], Any]
    variables: Sequence[tf.Variable]
    distributed: bool = True


def adapt(value: Any) -> Loop:
    """Wraps the object that `build` returned as a loop.

    Args:
        value: a `Loop`, another object with `step` and `variables`, an `orbit.StandardTrainer`, or
            a compiled model of tf_keras or Keras 3.

    Raises:
        UsageError: the object is none of these.
    """
    if isinstance(value, Loop):
        return value
    if isinstance(value, Step):
        return _own_loop(value)
    if isinstance(value, orbit.StandardTrainer):
        return _orbit_loop(value)
    if getattr(value, "optimizer", None) is not None and hasattr(value, "fit"):
        return _fit_loop(value)
    if callable(getattr(value, "step", None)) and hasattr(value, "variables"):
        return Loop(
            value.step, [value.variables() if callable(value.variables) else value.variables]
        )
    raise UsageError(
        f"build returned {type(value).__name__}, but must return a ctl.testing.Loop(step, variables), "
        "an object with `step` and `variables`, an orbit.StandardTrainer or a compiled Keras model."
    )


def _own_loop(step: Step) -> Loop:
    """Wraps a `ctl.Step`, which names the features of an element itself."""

    def train(batch: Nest) -> Mapping[str, Any]:
        step(batch)
        return step.results()

    return Loop(train, holders(vars(step)))


def _orbit_loop(trainer: orbit.StandardTrainer) -> Loop:
    """Wraps a trainer of Orbit, whose `train_step` takes the batches of the comparison.

    Args:
        trainer: the trainer. Its dataset is not read; everything that is an attribute is compared.
    """

    def copy(batch: Nest) -> Any:  # `train_step` may remove features from it
        return tf.nest.map_structure(lambda value: value, batch)

    # Each call of `next` in one step gets the same batch.
    step = tf.function(lambda batch: trainer.train_step(iter(lambda: copy(batch), None)))

    def train(batch: Nest) -> Any:
        trainer.train_loop_begin()
        step(batch)
        return trainer.train_loop_end()

    return Loop(train, holders(vars(trainer)))


def _fit_loop(model: tf_keras.Model) -> Loop:
    """Wraps a compiled model of tf_keras or Keras 3, and trains it by the function that `fit` calls.

    Args:
        model: the model. The examples must be a tuple (inputs, targets) or (inputs, targets,
            sample weights).
    """

    def train(batch: Nest) -> Mapping[str, Any]:
        rows = len(tf.nest.flatten(batch)[0])
        options = tf.data.Options()
        options.autotune.enabled = False  # deleting the iterator may wait for autotune's thread
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = tf.data.Dataset.from_tensor_slices(batch).batch(rows).with_options(options)
        if model.train_function is None:
            model.fit(dataset, verbose=0, shuffle=False)
            return {}
        strategy = model.distribute_strategy
        results = model.train_function(iter(strategy.experimental_distribute_dataset(dataset)))
        return dict(results)

    return Loop(train, [model, model.optimizer], distributed=False)
