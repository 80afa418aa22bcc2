"""Lists the operations of a profile by the time that they took."""

from collections import Counter
from collections.abc import Iterator
import pathlib
import re
from typing import Any

from tensorflow.tsl.profiler.protobuf import xplane_pb2

# Operations that only call others.
_CALLS = ("While", "If", "Case", "PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient")
_LOOP = re.compile(r"^(\w*while\w*/body/(_\d+/)?)+")  # the inner loop, the same for all steps


def list_operations(path: pathlib.Path) -> list[tuple[str, float]]:
    """Returns the operations of a profile and their seconds, the costliest first.

    The time of an operation is the time of its kernels on the devices. If the profile has no device but
    the CPU, it is the time of its calls in all threads.

    Args:
        path: a file *.xplane.pb that TensorFlow's profiler has written.
    """
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    planes = [plane for plane in space.planes if plane.name.startswith("/device:")]
    has_devices = any(line.events for plane in planes for line in plane.lines)
    picoseconds: Counter[str] = Counter()
    for plane in planes if has_devices else space.planes:
        for name, duration in _read_kernels(plane) if has_devices else _read_calls(plane):
            picoseconds[_LOOP.sub("", name)] += duration
    return [(name, count / 1e12) for name, count in picoseconds.most_common()]


def _read_calls(plane: Any) -> Iterator[tuple[str, int]]:
    """Yields the operations that the threads of a host called: "path/to/node:Type"."""
    for line in plane.lines:
        for event in line.events:
            metadata = plane.event_metadata[event.metadata_id]
            name, _, kind = metadata.name.rpartition(":")
            is_operation = metadata.display_name == kind and name and not name.endswith(":")
            if is_operation and kind not in _CALLS:
                yield metadata.name, event.duration_ps


def _read_kernels(plane: Any) -> Iterator[tuple[str, int]]:
    """Yields the kernels of a device, named by the operation that launched them if it is known."""
    names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
    for line in plane.lines:
        # The other lines repeat the kernels, grouped by module or by step.
        if not line.name.startswith(("Stream", "XLA Ops")):
            continue
        for event in line.events:
            metadata = plane.event_metadata[event.metadata_id]
            stats = {names[s.metadata_id]: s for s in (*metadata.stats, *event.stats)}
            operation = stats.get("tf_op")
            text = metadata.name
            if operation is not None:
                text = operation.str_value or names.get(operation.ref_value, "") or text
            yield text, event.duration_ps
