"""Frees the graphs in which `tf.custom_gradient` was called.

TensorFlow registers the gradient of each such call for the life of the process. The gradient refers to
tensors of its graph, so the graph of a training step, which calls `all_reduce`, was never freed.
"""

from typing import Any
import weakref

from ctl.private.tensorflow import autograph_artifact, ops

_PREFIX = "CustomGradient-"  # of the names that tf.custom_gradient generates


class Gradients(dict):
    """TensorFlow's gradients by name; the graph of a custom gradient owns it, and removes it."""

    def __setitem__(self, name: str, entry: dict[str, Any]) -> None:
        graph = ops.get_default_graph()
        if name.startswith(_PREFIX) and graph.building_function:
            entry = {**entry, "type": _owned_by(graph, name, entry["type"])}
            weakref.finalize(graph, self.pop, name, None).atexit = False
        super().__setitem__(name, entry)


def _owned_by(graph: Any, name: str, function: Any) -> Any:
    """Returns a function that calls `function`, but refers to it through its graph only."""
    setattr(graph, name, function)
    reference = weakref.ref(graph)

    @autograph_artifact
    def gradient(op: Any, *upstream: Any) -> Any:
        return getattr(reference(), name)(op, *upstream)

    return gradient
