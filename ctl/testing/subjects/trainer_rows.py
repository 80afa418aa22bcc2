"""Measures the rows of a ctl trainer: their values, and their parts of the gradient."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.autograph import convert, traced
from ctl.replica.step.engine import engine_of
from ctl.replica.step.microbatches import unpack
from ctl.replica.step.preprocessing import call_sample_weight
from ctl.testing.contents import Names, contents_of
from ctl.testing.diagnosis.evidence import attempt
from ctl.testing.subjects.base import RowValues, Terms
from ctl.trainer import StandardTrainer


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


def compute_rows(trainer: StandardTrainer, batch_size: int, *, training: bool) -> RowValues:
    """Computes the rows of the first batch.

    Args:
        trainer: the trainer, on any replicas.
        batch_size: global batch size.
        training: whether `forward` computes as in training, or as in evaluation.
    """
    strategy = trainer.strategy

    def replica(batch: Any, row_mask: Any) -> Any:
        outputs, losses, weights = _row_values(trainer, batch, row_mask, training=training)
        return tf.nest.flatten(outputs), losses, weights

    def per_replica(values: Any) -> list[np.ndarray]:
        return [np.asarray(v) for v in strategy.experimental_local_results(values)]

    compute = traced(lambda *args: strategy.run(replica, args=args))
    outputs, losses, weights = compute(*_first_batch(trainer))
    by_output = [per_replica(values) for values in outputs]
    return RowValues(
        [np.concatenate(values)[:batch_size] for values in by_output],
        np.concatenate(per_replica(losses))[:batch_size],
        np.concatenate(per_replica(weights))[:batch_size],
        [list(values) for values in zip(*by_output, strict=True)],
    )


def compute_terms(trainer: StandardTrainer, names: Sequence[Names]) -> Terms:
    """Computes the gradients of the rows and of the regularization losses, with the initial weights.

    An update is no combination of them if rows depend on each other, or if a trainer's own step adds
    another loss.

    Args:
        trainer: the trainer on one replica.
        names: `Record.names` of another run.
    """
    variables = trainer.model.trainable_variables
    rows, row_mask = _first_batch(trainer)

    @traced
    def compute_gradients() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            _, losses, _ = _row_values(trainer, rows, row_mask)
            penalties = convert(trainer.regularization_losses)()
            terms = [*tf.unstack(losses), tf.add_n([tf.zeros([], losses.dtype), *penalties])]
        return [_flatten(tape.gradient(t, variables), variables) for t in terms]

    columns = [np.asarray(v, np.float64) for v in compute_gradients()]
    weights = np.asarray(_flatten(variables, variables), np.float64)
    by_id = {id(v): name for name, v in contents_of(trainer).name_variables(names).items()}
    return Terms(
        rows=np.stack(columns[:-1], axis=1),
        penalty=columns[-1][:, np.newaxis],
        weights=weights[:, np.newaxis],
        names=tuple(by_id[id(v)] for v in variables),
    )


def _first_batch(trainer: StandardTrainer) -> tuple[Any, Any]:
    """Returns the first distributed batch and its row mask."""
    return unpack(next(iter(engine_of(trainer).training_data(0))))


def _row_values(
    trainer: StandardTrainer, batch: Any, row_mask: Any, *, training: bool = True
) -> Any:
    """Returns outputs, losses and sample weights of one replica's rows."""
    with engine_of(trainer).step.rows(batch, row_mask):
        batch = convert(trainer.preprocess)(batch)
        outputs = convert(trainer.forward)(batch, training=training)
        losses = convert(trainer.per_example_loss)(batch, outputs)
        weights = call_sample_weight(trainer, batch, training=training)
    return outputs, losses, tf.ones_like(losses) if weights is None else weights


def _flatten(values: Sequence[Any], variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Concatenates all elements; zeros for a gradient that is None."""
    tensors = [
        tf.zeros_like(variable) if value is None else tf.convert_to_tensor(value)
        for value, variable in zip(values, variables, strict=True)
    ]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
