"""Reads the attributes of a trainer that Keras and TensorFlow wrapped."""

from collections.abc import Iterator
from typing import Any


def unwrap(item: Any) -> Any:
    """Converts the lists and dicts that Keras wrapped, which `tf.nest` takes for leaves."""
    if isinstance(item, dict):
        return {name: unwrap(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [unwrap(value) for value in item]
    return item


def named_leaves(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested lists and dicts with its path, such as "members/1"."""
    if isinstance(item, dict):
        children = list(item.items())
    elif isinstance(item, list | tuple):
        children = list(enumerate(item))
    else:
        yield name, item
        return
    for key, value in children:
        yield from named_leaves(value, f"{name}/{key}" if name else str(key))
