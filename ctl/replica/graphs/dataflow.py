"""Follows the tensors of a graph back to their sources, while the step is traced."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def depends_on(value: Any, sources: Iterable[Any]) -> bool:
    """Returns whether a tensor is computed from one of the sources.

    Values that are read from variables do not depend on what was assigned to these. An operation that
    calls a function depends on all of its inputs.

    Args:
        value: a tensor of the graph that is being traced; an eager tensor depends on nothing.
        sources: tensors of that graph, or of one that encloses it.
    """
    targets = {id(source) for source in sources}
    seen, pending = set(), [value]
    while pending:
        tensor = pending.pop()
        if id(tensor) in targets:
            return True
        if id(tensor) in seen or not hasattr(tensor, "graph"):  # eager
            continue
        seen.add(id(tensor))
        pending.extend(tensor.op.inputs)
        # A function graph captures the tensors of the enclosing graph as inputs of its own.
        if tensor.op.type == "Placeholder" and tensor.dtype != tf.resource:
            captures = getattr(tensor.graph, "captures", ())
            pending.extend(outer for outer, inner in captures if inner is tensor)
    return False
