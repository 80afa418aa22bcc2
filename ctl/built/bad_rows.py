"""Finds the rows of a batch that make a step fail, once it has failed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import re
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.built_step import BuiltStep
from ctl.built.inner_loop import InnerLoop
from ctl.data.autograph import convert
from ctl.data.features import flatten_features
from ctl.data.layout import Layout
from ctl.data.source import Nest
from ctl.errors import NegativeWeight, UsageError
from ctl.update import loss
from ctl.update.microbatches import unpack
from ctl.update.preprocessing import call_sample_weight

# Of tf.nn.sparse_softmax_cross_entropy_with_logits.
_LABEL = re.compile(
    r"Received a label value of (?P<value>-?\d+) which is outside the valid range of "
    r"\[(?P<first>\d+), (?P<end>\d+)\)"
)
_SMALL = 1e-3  # in place of an element of a weight that is not finite


def read_batch(inner_loop: InnerLoop, step: int) -> Any:
    """Returns the global batch of a step; None if it cannot be read again."""
    plan, pipeline = inner_loop.plan, inner_loop.pipeline
    if inner_loop.own_dataset or pipeline.data("train").in_batches:
        return None
    layout = Layout(plan.layout.global_batch_size, 1)
    batch, _ = unpack(pipeline.data("train").first(layout, seed=plan.options.seed, start=step))
    return batch


def find_non_finite(inner_loop: InnerLoop, step: int) -> list[int]:
    """Returns the rows of a step whose own features or loss are not finite; [] if not known.

    Raises:
        NegativeWeight: a weight of a row is negative.
    """
    try:
        return non_finite_rows(inner_loop.step, read_batch(inner_loop, step))
    except NegativeWeight:
        raise
    except Exception:  # the user's code may not run outside of a step
        return []


def find_evaluated(step: BuiltStep, batches: Iterable[Nest]) -> int | None:
    """Returns the place of the first example whose own features or loss are not finite; None if unknown.

    Args:
        step: the `BuiltStep`.
        batches: the batches of the evaluation on one replica.
    """
    count = 0
    with contextlib.suppress(Exception):
        for element in batches:
            batch, mask = unpack(element)
            if rows := non_finite_rows(step, batch):
                return count + rows[0]
            count += len(tf.nest.flatten(batch)[0]) if mask is None else int(tf.reduce_sum(mask))
    return None


def non_finite_rows(step: BuiltStep, batch: Nest) -> list[int]:
    """Returns the rows of a batch whose own features or loss are not finite; [] if all are not.

    The weights may not be finite by now. In their place, small numbers are good enough: most of such
    losses come from a logarithm or a division of the data.

    Raises:
        NegativeWeight: a weight is negative, which XLA does not report.
    """
    _check_weights(step, batch)
    floats = [np.asarray(v) for v in flatten_features(batch).values() if v.dtype.is_floating]
    bad = _rows(floats)
    if not bad:
        with _finite_variables(step):
            losses = _compute_losses(step, batch)
        bad = _rows([np.asarray(value) for value in losses.values()])
    return bad if len(bad) < len(tf.nest.flatten(batch)[0]) else []


def explain_label(error: BaseException, read: Callable[[], Any] | None) -> str:
    """Explains the error about a label that is no class, with its example; "" for other errors.

    Args:
        error: the error.
        read: returns the global batch of the step, and the indexes of its examples or None; None if it
            cannot be read again.
    """
    label = isinstance(error, tf.errors.InvalidArgumentError) and _LABEL.search(str(error))
    if not label:
        return ""
    place = "an example"
    with contextlib.suppress(Exception):
        batch, indexes = read()  # type: ignore[misc]
        labels = flatten_features({"label": batch["label"]}).values()
        (row, *_), *_ = np.concatenate(
            [np.argwhere(np.asarray(each) == int(label["value"]))[:, :1] for each in labels]
        )
        place = f"example {indexes[row]}" if indexes else f"row {row} of the batch"
    return (
        f"The label of {place} is {label['value']}, outside of the classes {label['first']} to "
        f"{int(label['end']) - 1} that the outputs have: correct the labels, or the size of the last "
        "layer."
    )


def _rows(values: list[np.ndarray]) -> list[int]:
    finite = [np.isfinite(v).reshape(len(v), -1).all(axis=1) for v in values]
    return np.flatnonzero(~np.logical_and.reduce(finite)).tolist() if finite else []


def _compute_losses(step: BuiltStep, batch: Nest) -> dict[str, tf.Tensor]:
    hooks, factors = step.hooks, step.plan.options.loss_weights or loss.SINGLE
    with step.trace_scope(), step.rows(batch, None):
        prepared = convert(hooks.preprocess)(batch)
        outputs = convert(hooks.forward)(prepared, training=False)
        return loss.compute(hooks.per_example_loss, prepared, outputs, factors)


def _check_weights(step: BuiltStep, batch: Nest) -> None:
    try:
        with step.trace_scope(), step.rows(batch, None):
            prepared = convert(step.hooks.preprocess)(batch)
            weights = call_sample_weight(step.hooks, prepared, training=True)
            for each in weights.values() if isinstance(weights, Mapping) else [weights]:
                loss.row_weights(each, None, tf.float64)
    except UsageError as error:
        if isinstance(error.__cause__, tf.errors.InvalidArgumentError):
            raise NegativeWeight(str(error)) from error


@contextlib.contextmanager
def _finite_variables(step: BuiltStep) -> Iterator[None]:
    variables = [v for m in step.attributes.models() for v in m.variables if v.dtype.is_floating]
    values = [variable.numpy() for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.where(np.isfinite(value), value, _SMALL))
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
