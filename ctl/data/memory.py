"""Examples in memory: arrays, data frames, structured arrays and generators."""

import collections
from collections.abc import Callable, Iterable, Mapping
import contextlib
from typing import Any

import numpy as np

from ctl import errors
from ctl.data.elements import name_features
from ctl.data.features import copy_to_array, flatten_features, map_features
from ctl.data.source import Arrays, Nest
from ctl.errors import UsageError


def arrays(features: Nest) -> Arrays:
    """Returns a `Source` of examples held in memory.

        ctl.data.arrays({"x": np.random.rand(100, 4), "label": np.arange(100) % 3})

    Args:
        features: name -> array of shape [examples, ...]; or a pandas DataFrame or a structured numpy
            array, each of whose columns becomes a feature. A column "weight" is rejected: rename it if
            it is a feature, or pass a dict if it is the weight of the losses.

    Raises:
        UsageError: the arrays differ in their number of examples, or a value is not an array.
    """
    if isinstance(features, np.ndarray) and features.dtype.names:
        check_columns(features.dtype.names, "The array")
        return Arrays({name: np.ascontiguousarray(features[name]) for name in features.dtype.names})
    # A data frame is recognized by its methods, so that pandas need not be installed.
    if hasattr(features, "columns") and hasattr(features, "iloc"):
        check_columns(features.columns, "The data frame")
        return Arrays({str(name): make_column(features[name], name) for name in features.columns})
    return Arrays(features)


def generator(function: Callable[[], Iterable[Any]]) -> Arrays:
    """Reads all examples of a Python generator into memory.

        ctl.data.generator(lambda: ({"x": x, "label": y} for x, y in rows))

    For more examples than memory, write them to TFRecord files once, or return
    `tf.data.Dataset.from_generator(...)`, which is read from its beginning to resume.

    Args:
        function: returns an iterator of examples: dicts of arrays of equal shapes, or tuples
            `(x, label)` or `(x, label, weight)`.

    Raises:
        UsageError: there are no examples, or they differ in their features or shapes.
    """
    if not callable(function):
        raise UsageError(
            f"ctl.data.generator got {errors.type_name(function)}, but requires a function that "
            "returns an iterator: ctl.data.generator(lambda: ...)."
        )
    columns: dict[str, list[np.ndarray]] = {}
    count = 0
    for count, element in enumerate(function(), start=1):
        if type(element) is tuple:  # lists of numbers are arrays, not structures
            element = tuple(v if isinstance(v, Mapping) else _to_array(v, count) for v in element)
        named = name_features(element)
        if not isinstance(named, Mapping):
            raise UsageError(
                f"Example {count} of the generator is {errors.type_name(named)}, but must be a dict "
                "of arrays, or (x, label)."
            )
        example = flatten_features(named)
        if count == 1:
            columns = {name: [] for name in example}
        if example.keys() != columns.keys():
            raise UsageError(
                f"Example {count} of the generator has the features {sorted(example)}, but the first "
                f"one has {sorted(columns)}."
            )
        for name, value in example.items():
            array = _to_array(value, count)
            first = columns[name][0] if columns[name] else array
            if array.shape != first.shape or array.dtype.kind != first.dtype.kind:
                raise UsageError(
                    f"Example {count} of the generator has {name!r} of shape {array.shape} and dtype "
                    f"{array.dtype}, but the first one has {first.shape} and {first.dtype}: pad or "
                    "convert them to one."
                )
            columns[name].append(array)
    if not count:
        raise UsageError("The generator has no examples, but must have at least one.")
    return Arrays(map_features(lambda name, _: np.stack(columns[name]), named))


def _to_array(value: Any, number: int) -> np.ndarray:
    try:
        return copy_to_array(value)  # a generator may reuse its arrays
    except ValueError as error:
        raise UsageError(
            f"Example {number} of the generator has a value that is no array ({error}): pad its lists "
            "to one length."
        ) from None


def check_columns(names: Iterable[Any], place: str, *, named: bool = False) -> None:
    """Rejects repeated names, and a "weight", unless the user has `named` the features."""
    counts = collections.Counter(map(str, names))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise UsageError(f"{place} has several columns {repeated[0]!r}: rename all but one.")
    if "weight" in counts and not named:
        raise UsageError(
            f'{place} has a column "weight", which may be a feature or the weight of the losses: if it '
            'is a feature, rename it (in a file by columns={"kilograms": "weight", ...}); if it is the '
            'weight, tell it by columns={"weight": "weight", ...}, or pass a dict of arrays.'
        )


def make_column(values: Any, name: Any) -> np.ndarray:
    """Returns a column of a table as an array of numbers, booleans or strings."""
    array = np.asarray(values)
    if array.dtype != object:
        if array.dtype.kind in "Mm":
            raise UsageError(
                f"The column {name!r} has times ({array.dtype}): convert it to numbers."
            )
        return array
    rows = array.tolist()
    kinds = {type(row) for row in rows}
    if kinds <= {str, bytes}:
        return array
    stacked = array
    # numpy would convert numbers among strings to strings.
    if kinds <= {list, tuple, np.ndarray} or kinds <= {bool, int, float}:
        with contextlib.suppress(ValueError):
            stacked = np.stack([np.asarray(row) for row in rows])
    if stacked.dtype.kind not in "biufSU":
        types = sorted({kind.__name__ for kind in kinds})
        raise UsageError(
            f"The column {name!r} has values of the types {', '.join(types)}, or lists of different "
            "lengths: fill empty values, and convert the column to numbers or strings."
        )
    return stacked
