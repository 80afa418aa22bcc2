"""Profiles the steps that `train.profile` names, or the inner loop after a SIGUSR1."""

from collections import Counter
from collections.abc import Iterator
import contextlib
import pathlib
import re
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl.loop.actions.action import LoopAction
from ctl.private.tensorflow import xplane_pb2

if TYPE_CHECKING:
    from ctl.loop.workdir import Workdir

_SHOWN = 10  # operations
# Operations that only call others.
_CALLS = ("While", "If", "Case", "PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient")
_LOOP = re.compile(r"^(\w*while\w*/body/(_\d+/)?)+")  # the inner loop, the same for all steps


class Profiler(LoopAction):
    """Writes profiles for TensorBoard, and prints the operations that took the most time.

        Profiler("200:210", folder="runs/mine/summaries/train")

    While nothing is profiled, it costs two comparisons of numbers per inner loop. An inner loop ends at
    the first and the last step in every process, whether or not that process writes the profile.

    Args:
        steps: "FIRST:END", the steps to profile, END excluded; "" for none.
        folder: where to write; None if another process writes.
    """

    def __init__(self, steps: str = "", *, folder: str | None = None):
        self._first, self._end = map(int, steps.split(":")) if steps else (0, 0)
        self.loops_end_at = (self._first, self._end)
        self._folder = folder
        self._is_requested = False
        self._since: int | None = None  # the first step of the profile that is being recorded

    @classmethod
    def from_config(cls, config: Any, workdir: "Workdir") -> "Profiler":
        """Makes the action of a config; see registry.py."""
        return cls(config.train.profile, folder=workdir.summaries("train"))

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Profiles the next inner loop after a SIGUSR1, within a `with` block of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGUSR1, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    @contextlib.contextmanager
    def around(self, first: int, end: int) -> Iterator[None]:
        """Profiles the `with` block, which runs the steps from `first` to `end`, if required."""
        is_in_range = self._first <= first < self._end
        if not self._folder or not (is_in_range or self._is_requested):
            yield
            return
        if self._since is None:
            self._start(first)
        try:
            # The step marker of TensorBoard, which recognizes it by the prefix "train" of its name.
            # It is one marker per inner loop: the steps of a loop run in one function of TensorFlow.
            with tf.profiler.experimental.Trace("train", step_num=first, _r=1):
                yield
        except BaseException:
            self._stop()
            raise
        # Several inner loops may be in the range: one profile of all of them.
        if self._is_requested or end >= self._end:
            self._is_requested = False
            self._report(end)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _start(self, step: int) -> None:
        try:
            tf.profiler.experimental.start(self._folder)
            self._since = step
        except tf.errors.AlreadyExistsError:
            self.controller.reporter.print_line(
                "The steps are not profiled, since another profile is being recorded."
            )

    def _stop(self) -> None:
        if self._since is not None:
            self._since = None
            tf.profiler.experimental.stop()

    def _report(self, end: int) -> None:
        first = self._since
        if first is None:
            return
        self._stop()
        path, reporter = find_newest(pathlib.Path(str(self._folder))), self.controller.reporter
        if path is None:
            line = f"TensorFlow has written no profile of the steps {first} to {end}."
            reporter.print_line(line)
            return
        operations = list_operations(path)
        total = sum(seconds for _, seconds in operations) or 1.0
        shown, milliseconds = operations[:_SHOWN], 1e3 / (end - first)  # of a step
        reporter.record("profile", end, first=first, path=str(path), operations=shown)
        reporter.print_line(
            f"Profile of the steps {first} to {end}: {path.parent}. The operations that took the most "
            f"time, summed over threads or streams ({milliseconds * total:.2f} ms per step):"
        )
        for name, seconds in shown:
            numbers = f"{seconds / total:6.1%}  {milliseconds * seconds:9.3f} ms per step"
            reporter.print_line(f"  {numbers}  {name}")


def find_newest(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest profile in a folder of summaries; None if it has none."""
    paths = folder.glob("plugins/profile/*/*.xplane.pb")
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


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
        for *_, name, duration in read_kernels(plane) if has_devices else _read_calls(plane):
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


def read_kernels(plane: Any) -> Iterator[tuple[str, str, int]]:
    """Yields the name, the operation if it is known, and the picoseconds of each kernel of a device."""
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
            yield metadata.name, text, event.duration_ps
