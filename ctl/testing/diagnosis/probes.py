"""Measures a trainer in detail: the values of single rows, and how much each counts in an update."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ctl.data.autograph import convert, traced
from ctl.replica.step.build import seed_and_precision
from ctl.replica.step.engine import engine_of
from ctl.replica.step.microbatches import unpack
from ctl.testing.recording import Record, name_variables
from ctl.testing.splits import RATE, Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from ctl.trainer import StandardTrainer

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RowValues:
    """Values of the rows of the first batch, in the order of the global batch.

    Attributes:
        outputs: the model's outputs, [batch, ...] each.
        losses: [batch] losses, not reduced.
        weights: [batch] sample weights.
        by_replica: for each replica its outputs, [rows, ...] each, padding included.
    """

    outputs: list[np.ndarray]
    losses: np.ndarray
    weights: np.ndarray
    by_replica: list[list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The factors of the gradients in an update, relative to one replica.

    Attributes:
        rows: [batch] the factor of each row's gradient.
        penalty: the factor of the gradient of the regularization losses; 1 if there are none.
        extra_decay: the multiple of the weights that is added beyond `reference_decay`.
        reference_decay: the multiple of the weights that is added on one replica.
    """

    rows: np.ndarray
    penalty: float
    extra_decay: float
    reference_decay: float


def attempt(probe: Callable[[], T]) -> T | None:
    """Returns the result of a probe, or None if it raises.

    A trainer with its own step may not implement the methods that a probe calls, and fail with any
    error; the difference is then reported without its cause.
    """
    try:
        return probe()
    except Exception:
        return None


def find_narrow(trainer: StandardTrainer) -> str:
    """Names a method that returns fewer digits than float64, due to a cast in its code; "" if none."""

    def probe() -> str:
        batch, row_mask = _first_batch(trainer)

        @traced
        def compute() -> Any:
            outputs, losses, _ = _row_values(trainer, batch, row_mask)
            return outputs, losses

        specs = compute.get_concrete_function().structured_outputs
        for hook, values in zip(("forward", "per_example_loss"), specs, strict=True):
            for value in tf.nest.flatten(values):
                if value.dtype.is_floating and value.dtype != tf.float64:
                    return f"{hook} returns {value.dtype.name}"
        return ""

    return attempt(probe) or ""


def compute_rows(
    spec: TrialSpec, split: Split, precision: str, *, training: bool = True
) -> RowValues | None:
    """Computes the rows of the first batch on a split, without accumulation.

    Args:
        spec: what to run.
        split: how the batch is split.
        precision: dtype of the computation.
        training: whether `forward` computes as in training, or as in evaluation.

    Returns:
        The values, or None if the trainer does not implement the methods of ctl's step.
    """

    def probe() -> RowValues:
        trainer = build_trainer(spec, Split(split.batch, split.replicas), precision=precision)
        batch, row_mask = _first_batch(trainer)
        strategy = trainer.strategy

        def replica(batch: Any, row_mask: Any) -> Any:
            outputs, losses, weights = _row_values(trainer, batch, row_mask, training=training)
            return tf.nest.flatten(outputs), losses, weights

        compute = traced(lambda *args: strategy.run(replica, args=args))

        def per_replica(values: Any) -> list[np.ndarray]:
            return [np.asarray(v) for v in strategy.experimental_local_results(values)]

        outputs, losses, weights = compute(batch, row_mask)
        by_output = [per_replica(values) for values in outputs]
        return RowValues(
            [np.concatenate(values)[: split.batch] for values in by_output],
            np.concatenate(per_replica(losses))[: split.batch],
            np.concatenate(per_replica(weights))[: split.batch],
            [list(values) for values in zip(*by_output, strict=True)],
        )

    return attempt(probe)


class Decomposition:
    """Writes the updates of a batch size as a linear combination of the gradients of its rows.

        coefficients = Decomposition(spec, batch, precision).coefficients(record, reference)

    The gradients are computed on one replica, with the initial weights. There is no solution if rows
    depend on each other, or if a trainer's own step adds another loss.
    """

    def __init__(self, spec: TrialSpec, batch: int, precision: str):
        trainer = build_trainer(spec, Split(batch), precision=precision)
        self._trainer = trainer
        self._variables = trainer.model.trainable_variables
        rows, row_mask = _first_batch(trainer)

        @traced
        def compute_gradients() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                _, losses, _ = _row_values(trainer, rows, row_mask)
                penalties = convert(trainer.regularization_losses)()
                terms = [*tf.unstack(losses), tf.add_n([tf.zeros([], losses.dtype), *penalties])]
            return [_flatten(tape.gradient(t, self._variables), self._variables) for t in terms]

        weights = _flatten(self._variables, self._variables)
        columns = [np.asarray(v, np.float64) for v in (*compute_gradients(), weights)]
        self._columns = np.stack(columns, axis=1)
        self._norms = np.linalg.norm(self._columns, axis=0)
        self._batch = batch

    def coefficients(self, record: Record, reference: Record) -> Coefficients | None:
        """Returns the coefficients of the first update, or None if there is no solution."""
        expected, actual = self._solve(reference), self._solve(record)
        n = self._batch
        if expected is None or actual is None or not expected[:n].all():
            return None
        penalty = 1.0
        if self._norms[n]:
            penalty = actual[n] / expected[n] if expected[n] else float("inf")
        extra_decay = actual[-1] - expected[-1]
        return Coefficients(actual[:n] / expected[:n], penalty, extra_decay, expected[-1])

    def _solve(self, record: Record) -> np.ndarray | None:
        """Returns the coefficient of each column, by least squares."""
        named = name_variables(self._trainer, record.names)
        by_id = {id(variable): name for name, variable in named.items()}
        names = [by_id[id(v)] for v in self._variables]
        if not all(name in record.steps[0] for name in names):
            return None
        target = -np.concatenate([record.steps[0][name].ravel() for name in names]) / RATE
        used = self._norms > 0
        matrix = self._columns[:, used] / self._norms[used]
        solution, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=1e-9)
        error = np.linalg.norm(matrix @ solution - target)
        if rank < used.sum() or error > 1e-5 * np.linalg.norm(target):
            return None
        result = np.zeros(len(self._norms))
        result[used] = solution / self._norms[used]
        return result


def metrics_of_rows(
    spec: TrialSpec, batch: int, precision: str, selections: Sequence[Sequence[int]]
) -> list[dict[str, np.ndarray]]:
    """Computes the trainer's metrics on one replica for selected rows of the first batch.

    Args:
        spec: what to run.
        batch: global batch size.
        precision: dtype of the computation.
        selections: lists of row indexes, each for new metrics.
    """
    trainer = build_trainer(spec, Split(batch), precision=precision)
    rows, _ = _first_batch(trainer)
    results = []
    for indexes in selections:
        part = {name: tf.gather(value, list(indexes)) for name, value in rows.items()}
        with _scope(trainer, part, None):
            part = trainer.preprocess(part)
            metrics = trainer.build_metrics()
            outputs = trainer.forward(part, training=True)
            trainer.update_metrics(metrics, part, outputs, None)
        results.append({name: np.asarray(m.result()) for name, m in metrics.items()})
    return results


def _first_batch(trainer: StandardTrainer) -> tuple[Any, Any]:
    """Returns the first distributed batch and its row mask."""
    dataset = engine_of(trainer).pipeline.training_dataset(trainer.global_batch_size, start=0)
    return unpack(next(iter(dataset)))


@contextlib.contextmanager
def _scope(trainer: StandardTrainer, batch: Any, row_mask: Any) -> Any:
    """Enters the scope in which the trainer's own step calls its methods."""
    with seed_and_precision(trainer.options), engine_of(trainer).step.rows(batch, row_mask):
        yield


def _row_values(
    trainer: StandardTrainer, batch: Any, row_mask: Any, *, training: bool = True
) -> Any:
    """Returns outputs, losses and sample weights of one replica's rows."""
    with engine_of(trainer).step.rows(batch, row_mask):
        batch = convert(trainer.preprocess)(batch)
        outputs = convert(trainer.forward)(batch, training=training)
        losses = convert(trainer.per_example_loss)(batch, outputs)
        weights = convert(trainer.sample_weight)(batch)
    return outputs, losses, tf.ones_like(losses) if weights is None else weights


def _flatten(values: Sequence[Any], variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Concatenates all elements; zeros for a gradient that is None."""
    tensors = [
        tf.zeros_like(variable) if value is None else tf.convert_to_tensor(value)
        for value, variable in zip(values, variables, strict=True)
    ]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
