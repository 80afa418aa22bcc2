"""The interface of what a comparison runs: a loop or a trainer, and its runs on one split."""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf

from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.testing.comparison import tolerance_of
from ctl.testing.contents import Contents, Name, Names, free_name, read_all, read_value
from ctl.testing.logical_devices import copies
from ctl.testing.loop_record import LoopRecord, find_mismatches, flatten_numbers
from ctl.testing.splits import Split

S = TypeVar("S", bound="Subject")
T = TypeVar("T")
# Tried in this order: the precision, and whether floating-point examples are cast to it.
Attempts = tuple[tuple[str, bool], ...]


@dataclasses.dataclass(frozen=True)
class RowValues:
    """Values of the rows of the first batch, in the order of the global batch.

    Attributes:
        outputs: the model's outputs, [batch, ...] each.
        losses: [batch] losses, not reduced.
        weights: [batch] sample weights.
    """

    outputs: list[np.ndarray]
    losses: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class Terms:
    """The vectors of which an update is a linear combination on one replica.

    Attributes:
        rows: [elements, batch] the gradient or the update of each row alone.
        penalty: [elements, 0 or 1] the gradient of the regularization losses, if it is known.
        weights: [elements, n] the weights, together or by variable.
        names: the variables whose elements these are; () for all that are trained.
        error: maximum error of the combination, relative to the update.
    """

    rows: np.ndarray
    penalty: np.ndarray
    weights: np.ndarray
    names: Names = ()
    error: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The precision with which the splits of a loop can be compared.

    Attributes:
        tolerance: maximum error of an element, relative to the largest element.
        why: why the tolerance is not the one for float64; "" if it is.
        noise: the largest relative difference that another order of the rows makes; 0 if not measured.
        undecided: why the values cannot be compared; "" if they can be.
        random: whether the result depends on more than the values and the order of the rows.
    """

    tolerance: float
    why: str = ""
    noise: float = 0.0
    undecided: str = ""
    random: bool = False


class NarrowWeights(Exception):
    """The weights have fewer digits than the precision that was asked for."""


class SplitRun(abc.ABC):
    """A loop that is built for a split.

    Args:
        subject: what was built.
        split: how the global batch is split.
        strategy: the strategy of its variables.

    Attributes:
        update_order: on one replica, the names of the variables that each optimizer updates, in the
            order of the optimizers; [] if it is not known.
    """

    def __init__(self, subject: Any, split: Split, strategy: tf.distribute.Strategy):
        self.subject, self.split, self.strategy = subject, split, strategy
        self.update_order: list[list[str]] = []

    @property
    @abc.abstractmethod
    def contents(self) -> Contents:
        """Everything that a step may change."""

    @abc.abstractmethod
    def step(self, number: int) -> Any:
        """Trains the step with this number, from 0, and returns what it reports."""

    def evaluate(self) -> dict[str, Any]:
        """Evaluates the initial weights, if the loop has an evaluation of its own."""
        return {}

    def find_shared(self) -> str:
        """Returns the line that reads on a replica what another one has computed, or ""."""
        return ""

    def record(
        self, names: Sequence[Names] = (), *, steps: int | None = None, evaluate: bool = False
    ) -> LoopRecord:
        """Trains, and records every quantity after each step.

        Args:
            names: `Record.names` of the same loop on another split, used instead of its own names.
            steps: number of steps; those of the subject by default.
            evaluate: whether to evaluate before the first step.
        """
        results = flatten_numbers(self.evaluate() if evaluate else {})
        evaluation = {("evaluation", name): value for name, value in results}
        named = first_named = self.contents.name_variables(names)
        start = read_all(self.strategy, named)
        values, records, mismatches = dict(start), [], []
        for step in range(steps or self.subject.steps):
            old = {name: copies(self.strategy, v) for name, v in named.items()}
            quantities = self.read_results(self.step(step))
            named = self.contents.name_variables(names)  # with those that this step created
            for name, variable in named.items():
                value, new = read_value(self.strategy, variable), copies(self.strategy, variable)
                is_update = name[0] == "update" and name in values
                quantities[name] = value - values[name] if is_update else value
                values[name] = value
                if name[0] != "metric":  # each replica counts its own rows
                    mismatches += find_mismatches(name, step, old.get(name, new), new, variable)
            records.append(quantities)
        stages = (tuple(first_named), tuple(named))
        return LoopRecord(self.split, start, records, evaluation, mismatches, stages)

    def read_results(self, outputs: Nest) -> dict[Name, np.ndarray]:
        """Returns the values that a step reports, and the results of the metrics, as arrays.

        Raises:
            UsageError: the output is neither a number, nor a dict of numbers, nor None.
        """
        values: dict[Name, np.ndarray] = {}
        for name, value in _read_outputs(outputs):
            values["loss" if name == "loss" else "metric", name] = value
        for metric in self.contents.metrics:
            for name, value in flatten_numbers({metric.name: metric.result()}):
                values[free_name(values, "metric", name)] = value
        return values


@dataclasses.dataclass(frozen=True)
class Subject(abc.ABC):
    """What is run on every split.

    Attributes:
        factory: makes the loop or the trainer.
        examples: a nested structure of [examples, ...] arrays, in the order in which batches take them.
        steps: number of training steps.
        precision: dtype of the computation.
        plain: replace every optimizer by plain SGD, or its update rule.
    """

    factory: Callable[..., Any]
    examples: Any
    steps: int
    precision: str = "float64"
    plain: bool = True

    attempts: ClassVar[Attempts] = (("float64", True), ("float32", True))
    # Whether losses may be scaled in the precision of the comparison.
    scales_losses: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name for messages."""
        return getattr(self.factory, "__name__", None) or str(self.factory)

    @property
    def pads_rows(self) -> bool:
        """Whether every replica gets the same number of rows."""
        return True

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(tf.nest.flatten(self.examples)[0])

    def select(self: S, indexes: Sequence[int]) -> S:
        """Returns the same with the examples of these indexes."""
        rows = np.asarray(indexes, int)
        examples = tf.nest.map_structure(lambda v: np.asarray(v)[rows], self.examples)
        return dataclasses.replace(self, examples=examples)

    def cast(self: S, precision: str, *, examples: bool) -> S:
        """Returns the same in another precision, also of its floating-point examples if asked for."""

        def convert(values: Any) -> np.ndarray:
            array = np.asarray(values)
            return array.astype(precision) if examples and array.dtype.kind == "f" else array

        converted = tf.nest.map_structure(convert, self.examples)
        return dataclasses.replace(self, examples=converted, precision=precision)

    @abc.abstractmethod
    def start(self, split: Split) -> SplitRun:
        """Builds the loop for a split.

        Raises:
            UsageError: ctl rejects the split.
            NarrowWeights: the loop does not compute in the precision of the subject.
        """

    def accepting(self: S) -> S:
        """Returns the subject without the checks of ctl, as far as options switch them off."""
        return self

    def with_state_of(self: S, run: SplitRun) -> S:
        """Returns the same, whose runs start with the variables of a run."""
        return self

    def calibrate(self, run: SplitRun, record: LoopRecord) -> Calibration:
        """Measures on one replica how precisely the splits can be compared.

        Args:
            run: the first run on one replica.
            record: what it computed.
        """
        return Calibration(tolerance_of(self.precision))

    @abc.abstractmethod
    def find_narrow(self, run: SplitRun) -> str:
        """Names code of a run in float64 that computes in fewer digits; "" if none is known."""

    def measure_tolerance(self, run: SplitRun, record: LoopRecord) -> float:
        """Returns the relative tolerance for the loop's own optimizers."""
        return tolerance_of(self.precision)

    def with_own_optimizers(self: S) -> S:
        """Returns the same with its own optimizers instead of plain SGD."""
        return dataclasses.replace(self, plain=False)

    def has_own_optimizers(self, run: SplitRun) -> bool:
        """Returns whether another optimizer than plain SGD is to be compared, too."""
        return bool(run.contents.optimizers)

    def rows(self, split: Split, *, training: bool = True) -> RowValues | None:
        """Returns the outputs and losses of the single rows of a split, or None if they are unknown."""
        return None

    def terms(self, batch: int, names: Sequence[Names]) -> Terms | None:
        """Returns the vectors of which the update of a global batch consists on one replica.

        Args:
            batch: global batch size.
            names: `Record.names` of another run.
        """
        return None

    def metrics(self, indexes: Sequence[int], replicas: int) -> list[np.ndarray]:
        """Trains one step on a global batch, and returns the results of the metrics in their order.

        Args:
            indexes: the examples of the batch.
            replicas: number of replicas.
        """
        record = self.select(indexes).start(Split(len(indexes), replicas)).record(steps=1)
        results = (key for key in record.steps[0] if key[0] == "metric")
        return [record.steps[0][key] for key in results if key not in record.names[-1]]

    def scaled_records(
        self, run: SplitRun, scale: float
    ) -> tuple[LoopRecord, LoopRecord, float] | None:
        """Makes a step under two loss scales, the second of them `scale` times larger.

        Returns:
            Both records, and the tolerance; None if the loop does not scale its loss.
        """
        return None


def attempt(probe: Callable[[], T]) -> T | None:
    """Returns the result of a probe, or None if it raises.

    A trainer with its own step may not implement the methods that a probe calls, and fail with any
    error; the difference is then reported without its cause.
    """
    try:
        return probe()
    except Exception:
        return None


def _read_outputs(outputs: Nest) -> list[tuple[str, np.ndarray]]:
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
