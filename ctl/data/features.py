"""The features of examples and batches: a dict, in which `label` may be a dict of several targets."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError

RESERVED = ("label", "weight")  # the entries of a batch that are not features
_FEATURE = "x/"  # before the name of a feature that is called like one of them


def name_as_features(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a batch for features: one called "weight" becomes "x/weight"."""
    return {_FEATURE + name if name in RESERVED else name: v for name, v in values.items()}


def select_features(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of a batch by their own names, as the model takes them."""
    own = {_FEATURE + name: name for name in RESERVED}
    return {own.get(name, name): v for name, v in batch.items() if name not in RESERVED}


def check_names(features: Mapping[Any, Any]) -> None:
    """Raises UsageError if a feature has a name that is no string."""
    for name in features:
        if not isinstance(name, str):
            raise UsageError(
                f"A feature has the name {name!r}, but names must be strings: write for example "
                f'"x{name}" in place of {name!r}.'
            )


def map_features(
    function: Callable[[str, Any], Any], features: Mapping[str, Any]
) -> dict[str, Any]:
    """Applies a function to each feature, and to each target of a dict of them.

    Args:
        function: (name, value) -> new value; a target's name is "label/NAME".
        features: name -> value, or a dict of values.
    """
    check_names(features)

    def apply(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: apply(f"{name}/{key}", each) for key, each in value.items()}
        return function(name, value)

    return {name: apply(name, value) for name, value in features.items()}


def flatten_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features and targets in one dict, by the names of `map_features`."""
    flat: dict[str, Any] = {}
    map_features(flat.__setitem__, features)
    return flat


def flat_names(features: Mapping[str, Any]) -> list[str]:
    """Returns the names of `map_features`, in the order of `tf.nest.flatten`, which sorts dicts."""
    return tf.nest.flatten(map_features(lambda name, _: name, features))


def copy_to_array(value: Any) -> np.ndarray:
    """Returns a copy of a Python value as an array; strings become an array of objects."""
    array = np.array(value)
    # numpy's own types of strings drop zero bytes at the end.
    return np.array(value, object) if array.dtype.kind in "SU" else array
