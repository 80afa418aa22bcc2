"""Finds convolutions whose gradient oneDNN computes wrong on this CPU.

On a CPU with AVX2 and without AVX-512, the filter gradient of a 1x1 convolution with a stride of 2 or
more and fewer than 8 input channels is wrong in float32: docs/install.md says in which versions.
"""

from collections.abc import Iterable, Iterator, Sequence
import os
from typing import Any

import tensorflow as tf

from ctl.built.observers import Observer
from ctl.errors import print_line
from ctl.graphs import ops
from ctl.graphs.places import place_of
from ctl.rows.row_mask import Rows

FIX = "set the environment variable TF_ENABLE_ONEDNN_OPTS=0"
_MIN_CHANNELS = 8  # with as many input channels the gradient is right
# Variables that restrict the instruction sets of the kernels.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_REPORTED: set[str] = set()  # once per process, not per replica and trace


class WrongGradients(Observer):
    """Prints one line for each wrong gradient of a step."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a warning for each wrong gradient among the ops of a trace."""
        for text in find(operations):
            if text not in _REPORTED:
                _REPORTED.add(text)
                print_line(f"Warning: {text}: {FIX}.")


def find(operations: Iterable[Any]) -> list[str]:
    """Describes the wrong gradients among ops, and in the functions that they call."""
    found = [*_wrong_gradients(operations)]
    return [
        f"oneDNN computes the gradient of a 1x1 convolution wrong on this CPU, {_place(op)}"
        for op in (found if found and _uses_avx2() else ())
    ]


def _wrong_gradients(operations: Iterable[Any]) -> Iterator[Any]:
    for op in operations:
        if op.type == "Conv2DBackpropFilter" and _is_wrong(op):
            yield op
        for _, graph in ops.called_graphs(op):
            yield from _wrong_gradients(graph.get_operations())


def _is_wrong(op: Any) -> bool:
    kernel = op.outputs[0]
    if kernel.dtype != tf.float32 or any(kind in op.device for kind in ("GPU", "TPU")):
        return False
    height, width, channels, _ = kernel.shape.as_list()
    is_small = (height, width) == (1, 1) and channels is not None and channels < _MIN_CHANNELS
    return is_small and max(op.get_attr("strides")) > 1


def _place(op: Any) -> str:
    """Names the convolution of a gradient: the op that has the same input."""
    forward = [each for each in op.inputs[0].consumers() if each.type == "Conv2D"]
    return place_of((forward or [op])[0], own_parts=1)


def _uses_avx2() -> bool:
    """Returns whether oneDNN chooses its kernels for AVX2."""
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return False
    from ctl.hardware import host  # for a step with such a gradient

    names = host.identify_cpu()[1].split()
    limit = next((os.environ[name].upper() for name in _LIMITS if name in os.environ), "")
    if limit.startswith("AVX2") or not any(name.startswith("avx512") for name in names):
        return "avx2" in names and limit not in ("SSE41", "AVX")
    return False
