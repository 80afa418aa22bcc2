"""Checks that all replicas hold the same values of the variables that a user's step assigns."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built.observers import Observer
from ctl.errors import UsageError, list_some
from ctl.keras.variables import moving_statistics, variables_of


class Copies(Observer):
    """Compares the replicas' copies of the variables after the first steps."""

    @classmethod
    def check_variables(cls, items: Mapping[str, Any]) -> None:
        """Raises a UsageError if the copies of a variable differ."""
        check_copies(items)


def check_copies(items: Mapping[str, Any]) -> None:
    """Checks that the replicas' copies of each variable agree.

    A step may assign a variable that is not trainable: a queue of keys, centers of classes, a running
    mean, scales that a layer initializes from its first batch. A value that each replica computes from
    its own rows differs between them; from then on, so does what they compute.

    Args:
        items: name -> model, layer, optimizer, module or variable of a trainer, or a structure of them.

    Raises:
        UsageError: the copies of a variable differ. The message names it.
    """
    different = [(name, v) for name, v in _variables(items) if _differs(v)]
    if different:
        names = list_some([name for name, _ in different])
        cause = (
            "the optimizer, or the step, computes another update on each replica. Code in Python, such "
            "as a counter, runs once for each of them: count in a tf.Variable, such as iterations. A "
            "value that the step assigns must be that of the global batch, by ctl.replica.all_gather(x)"
            if all(variable.trainable for _, variable in different)
            else "the step assigns a value that is not the same on all replicas. If it is computed from "
            "rows, compute it from those of all replicas, by ctl.replica.all_gather(rows)"
        )
        raise UsageError(f"The replicas' copies of {names} differ: {cause}.")


def _variables(items: Mapping[str, Any]) -> Iterator[tuple[str, tf.Variable]]:
    for attribute, value in items.items():
        for item in tf.nest.flatten(value):
            if isinstance(item, tf.Variable):
                yield attribute, item
            elif isinstance(item, tf_keras.layers.Layer):
                # A plain batch normalization uses only a part of the batch, of which the plan warns.
                statistics = moving_statistics(item)
                for variable in variables_of(item):
                    # Matrices that are trained are large, and only the optimizer assigns them.
                    trained = variable.trainable and variable.shape.rank > 1
                    if not trained and id(variable) not in statistics:
                        yield variable.name, variable


def _differs(variable: tf.Variable) -> bool:
    components = getattr(variable, "values", ())
    local = variable.synchronization == tf.VariableSynchronization.ON_READ
    # Each replica holds a part of a sum, and only the first one counts.
    summed = (tf.VariableAggregation.SUM, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    if len(components) < 2 or (local and variable.aggregation in summed):
        return False
    if not (variable.dtype.real_dtype.is_floating or variable.dtype.is_integer):
        return False
    first, *others = (tf.convert_to_tensor(component).numpy() for component in components)
    return any(not _equal(first, other, variable.dtype) for other in others)


def _equal(one: np.ndarray, two: np.ndarray, dtype: tf.DType) -> bool:
    """Returns whether two copies are equal, up to what the order of sums changes on a GPU."""
    if not dtype.real_dtype.is_floating:
        return np.array_equal(one, two)
    tolerance = float(np.finfo(dtype.as_numpy_dtype).eps) ** 0.6 if dtype.size > 2 else 0.05
    wide = np.complex128 if dtype.is_complex else np.float64
    one, two = one.astype(wide), two.astype(wide)
    scale = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
    return np.allclose(one, two, rtol=0.0, atol=tolerance * scale, equal_nan=True)
