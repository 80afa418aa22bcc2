"""Names the features of examples: tuples, as tf_keras takes them, become dicts."""

import dataclasses
from typing import Any

import tensorflow as tf

from ctl.data.source import Augmented, Data, GlobalBatches, PerReplica
from ctl.errors import UsageError


def name_features(element: Any) -> Any:
    """Names the features of an element of a dataset.

    Args:
        element: a dict; or `(x, label)` or `(x, label, weight)`, where x is a tensor or a dict of
            features; or a named tuple. Its values are tensors, specs or the values of replicas.

    Returns:
        A dict; anything but a tuple is returned as it is.

    Raises:
        UsageError: it is a tuple of another form.
    """
    if not isinstance(element, tuple):
        return element
    if hasattr(element, "_fields"):
        return dict(zip(element._fields, element, strict=True))
    x, *targets = element if element else [()]
    named = dict(zip(("label", "weight"), targets, strict=False))
    nested = isinstance(x, tuple | list) or any(isinstance(t, tuple | list | dict) for t in targets)
    if len(element) not in (2, 3) or nested or (isinstance(x, dict) and x.keys() & named.keys()):
        raise UsageError(
            f"The elements of the data are {element}, but must be dicts of tensors, or (x, label) or "
            "(x, label, weight) with one tensor or a dict of tensors as x: map them to dicts, such as "
            '{"x": ..., "label": ...}.'
        )
    return {**(x if isinstance(x, dict) else {"x": x}), **named}


def name_dataset_features(data: Data) -> Data:
    """Names the features of every element of a dataset; a `Source` is returned as it is."""
    if isinstance(data, GlobalBatches | PerReplica):
        return dataclasses.replace(data, dataset=_name_elements(data.dataset))
    if isinstance(data, Augmented) and isinstance(data.data, tf.data.Dataset):
        return dataclasses.replace(data, data=_name_elements(data.data))
    return _name_elements(data) if isinstance(data, tf.data.Dataset) else data


def _name_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    spec = dataset.element_spec
    if not isinstance(spec, tuple):
        return dataset
    name_features(spec)  # reports an element that cannot be named before its values are read
    if hasattr(spec, "_fields"):  # tf.data does not unpack a named tuple
        return dataset.map(name_features)
    return dataset.map(lambda *values: name_features(values))
