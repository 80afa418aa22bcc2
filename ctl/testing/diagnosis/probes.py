"""Looks closer at a trainer: what single rows come to, and with what weight each counts."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.testing.recording import Plan, Record, build, variables
from ctl.testing.splits import RATE, Split
from ctl.trainer import StandardTrainer, unpack


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows of the first batch come to, in the order of the global batch.

    Attributes:
        outputs: [batch, ...] each.
        losses: [batch], not reduced.
        weights: [batch] sample weights.
        by_replica: of each replica the [rows, ...] outputs, padding included.
    """

    outputs: list[np.ndarray]
    losses: np.ndarray
    weights: np.ndarray
    by_replica: list[list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often an update counts each gradient that it can be made of.

    Attributes:
        rows: [batch] how often each row's, against one replica.
        penalty: how often that of the regularization losses, against one replica; 1 if there is
            none.
        decay: what multiple of the weights was added, beyond that on one replica.
        decay_of_reference: what multiple is added on one replica.
    """

    rows: np.ndarray
    penalty: float
    decay: float
    decay_of_reference: float


def rows(plan: Plan, split: Split, precision: str, *, training: bool) -> Rows:
    """The rows of the first batch under a split, without accumulation."""
    split = Split(split.batch, split.replicas)
    trainer = build(plan, split, precision=precision)
    batch, present = _first(trainer)
    strategy = trainer.strategy

    def replica(batch: Any, present: Any) -> Any:
        outputs, losses, weight = _losses(trainer, batch, present, training)
        return tf.nest.flatten(outputs), losses, weight

    run = tf.function(lambda *args: strategy.run(replica, args=args))
    outputs, losses, weights = run(batch, present)

    def local(values: Any) -> list[np.ndarray]:
        return [np.asarray(v) for v in strategy.experimental_local_results(values)]

    def joined(values: Any) -> np.ndarray:
        return np.concatenate(local(values))[: split.batch]

    each = [local(values) for values in outputs]
    return Rows(
        [joined(values) for values in outputs],
        joined(losses),
        joined(weights),
        [list(of_replica) for of_replica in zip(*each, strict=True)],
    )


class Decomposition:
    """Takes the updates of a batch size apart into the gradients of its rows.

    counts = Decomposition(plan, batch, precision).counts(record, reference)

    The update of the reference must be made of nothing else: not so where rows depend on each
    other, or an own step adds another loss; then there are no counts.
    """

    def __init__(self, plan: Plan, batch: int, precision: str):
        """Computes the gradient of each row on one replica, at the first weights."""
        trainer = build(plan, Split(batch), precision=precision)
        self._trainer = trainer
        self._variables = trainer.model.trainable_variables
        batch_rows, present = _first(trainer)

        @tf.function
        def gradients() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                _, losses, _ = _losses(trainer, batch_rows, present, True)
                each = tf.unstack(losses)
                penalty = tf.add_n([tf.zeros([], losses.dtype), *trainer.regularization_losses()])
            found = [_flat(tape.gradient(loss, self._variables), self._variables) for loss in each]
            return found, _flat(tape.gradient(penalty, self._variables), self._variables)

        found, penalty = gradients()
        weights = _flat(self._variables, self._variables)
        columns = [np.asarray(v, np.float64) for v in (*found, penalty, weights)]
        self._sizes = [np.linalg.norm(c) for c in columns]
        self._columns = np.stack(columns, axis=1)
        self._batch = batch

    def counts(self, record: Record, reference: Record) -> Counts | None:
        """What the first update under a split is made of; None if it cannot be told."""
        base, found = self._solve(reference), self._solve(record)
        if base is None or found is None or not base[: self._batch].all():
            return None
        penalty = 1.0
        if self._sizes[-2]:
            penalty = found[-2] / base[-2] if base[-2] else float("inf")
        n = self._batch
        return Counts(found[:n] / base[:n], penalty, found[-1] - base[-1], base[-1])

    def _solve(self, record: Record) -> np.ndarray | None:
        named = {id(v): name for name, v in variables(self._trainer, record.names).items()}
        names = [named[id(v)] for v in self._variables]
        if not all(name in record.steps[0] for name in names):
            return None
        target = -np.concatenate([record.steps[0][name].ravel() for name in names]) / RATE
        used = [i for i, size in enumerate(self._sizes) if size > 0]
        matrix = self._columns[:, used]
        scale = np.linalg.norm(matrix, axis=0)
        solution, _, rank, _ = np.linalg.lstsq(matrix / scale, target, rcond=1e-9)
        rest = np.linalg.norm(matrix / scale @ solution - target)
        if rank < len(used) or rest > 1e-5 * np.linalg.norm(target):
            return None
        result = np.zeros(len(self._sizes))
        result[used] = solution / scale
        return result


def metrics_if(
    plan: Plan, batch: int, precision: str, shares: Sequence[Sequence[int]], *, training: bool
) -> list[dict[str, np.ndarray]]:
    """What the trainer's metrics give on one replica for chosen rows of the first batch.

    Args:
        plan: what to run.
        batch: rows of the global batch.
        precision: what to compute in.
        shares: lists of rows, each for metrics of its own.
        training: what the model is called with.
    """
    trainer = build(plan, Split(batch), precision=precision)
    whole, _ = _first(trainer)
    found = []
    for indexes in shares:
        part = {name: tf.gather(value, list(indexes)) for name, value in whole.items()}
        with trainer.building(), trainer.rows(part, None):
            part = trainer.preprocess(part)
            metrics = trainer.build_metrics()
            outputs = trainer.forward(part, training=training)
            trainer.update_metrics(metrics, part, outputs, None)
        found.append({name: np.asarray(m.result()) for name, m in metrics.items()})
    return found


def attempt(probe: Callable[[], Any]) -> Any:
    """What a probe finds, or None where this trainer cannot be looked at in that way.

    An own step may leave out hooks that the probe calls, with any error at all; the difference
    stands without its cause.
    """
    try:
        return probe()
    except Exception:
        return None


def _first(trainer: StandardTrainer) -> tuple[Any, Any]:
    return unpack(next(iter(trainer.feed.training_dataset(trainer.global_batch_size, start=0))))


def _losses(trainer: StandardTrainer, batch: Any, present: Any, training: bool) -> Any:
    with trainer.rows(batch, present):
        batch = trainer.preprocess(batch)
        outputs = trainer.forward(batch, training=training)
        losses = trainer.per_example_loss(batch, outputs)
        weight = trainer.sample_weight(batch)
    return outputs, losses, tf.ones_like(losses) if weight is None else weight


def _flat(values: Sequence[Any], variables: Sequence[tf.Variable]) -> tf.Tensor:
    there = [
        tf.zeros_like(v) if value is None else tf.convert_to_tensor(value)
        for value, v in zip(values, variables, strict=True)
    ]
    return tf.concat([tf.reshape(value, [-1]) for value in there], axis=0)
