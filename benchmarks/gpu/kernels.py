"""The time of a step by kinds of kernels, from a profile."""

import collections
from collections.abc import Callable, Iterator
import pathlib
import re
import tempfile
from typing import Any

import tensorflow as tf

from ctl.loop import profiler
from ctl.private.tensorflow import xplane_pb2

_LONGEST = 25  # kernels that are listed by name
# The kind of a kernel is that of the first pattern in its name. XLA names its kernels after fusions.
_KINDS = (
    (r"gemm_fusion|triton_gemm", "matrix products"),
    (r"fusion|wrapped|memcpy|memset|copy", "elementwise operations"),
    (r"sdpa|fmha|flash", "attention"),
    (r"conv|fprop|dgrad|wgrad", "convolutions"),
    (r"gemm|nvjet|cutlass|splitk|cublas", "matrix products"),
    (r"", "elementwise operations"),
)


def measure(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Profiles a call that runs steps.

    Returns:
        `kernels`, their number per step; `milliseconds` per step by kind; and `longest`, lists of the
        name, the milliseconds and the number per step. All are 0 or empty without a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run()
        path = profiler.find_newest(pathlib.Path(folder))
        events = list(_read(path)) if path else []
    kinds: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    counts = collections.Counter(name for name, _ in events)
    for name, picoseconds in events:
        kinds[find_kind(name)] += picoseconds
        times[name] += picoseconds
    unit = 1e9 * steps  # picoseconds of all steps in a millisecond per step
    return {
        "kernels": round(len(events) / steps),
        "milliseconds": {kind: round(time / unit, 2) for kind, time in kinds.items()},
        "longest": [
            [name[:80], round(time / unit, 3), round(counts[name] / steps)]
            for name, time in times.most_common(_LONGEST)
        ],
    }


def find_kind(name: str) -> str:
    """Returns the kind of a kernel by its name."""
    return next(kind for pattern, kind in _KINDS if re.search(pattern, name.lower()))


def _read(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Yields the name and the picoseconds of each kernel of a profile of TensorFlow."""
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        if plane.name.startswith("/device:GPU"):
            yield from ((name, time) for name, _, time in profiler.read_kernels(plane))
