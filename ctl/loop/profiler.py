"""Profiles the steps that `train.profile` names, or the inner loop after a SIGUSR1."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
import signal
from types import FrameType

import tensorflow as tf

from ctl.errors import print_line
from ctl.loop import costliest

_SHOWN = 10  # operations


class Profiler:
    """Writes profiles for TensorBoard, and prints the operations that took the most time.

        profiler = Profiler("200:210", folder="runs/mine/summaries/train")
        with profiler.on_signal():
            boundary = profiler.boundary(step, boundary)
            with profiler.profile(step, boundary):
                train_a_little()

    While nothing is profiled, it costs two comparisons of numbers per inner loop.

    Args:
        steps: "FIRST:END", the steps to profile, END excluded; "" for none.
        folder: where to write; None if another process writes.
        print_line: prints a line.
        on_event: called as on_event("profile", step, path=..., operations=...).
    """

    def __init__(
        self,
        steps: str = "",
        *,
        folder: str | None = None,
        print_line: Callable[[str], None] = print_line,
        on_event: Callable[..., None] | None = None,
    ):
        self._first, self._end = map(int, steps.split(":")) if steps else (0, 0)
        self._folder = folder
        self._print_line = print_line
        self._on_event = on_event or (lambda *_, **__: None)
        self._is_requested = False
        self._since: int | None = None  # the first step of the profile that is being recorded

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """Profiles the next inner loop after a SIGUSR1, within the `with` block."""
        before = signal.signal(signal.SIGUSR1, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def boundary(self, step: int, boundary: int) -> int:
        """Returns the end of a loop that begins at `step`: `boundary`, or an earlier end of the profile.

        It is the same in every process, whether or not that process writes the profile.
        """
        ahead = [edge for edge in (self._first, self._end) if step < edge < boundary]
        return min(ahead, default=boundary)

    @contextlib.contextmanager
    def profile(self, first: int, boundary: int) -> Iterator[None]:
        """Profiles the `with` block, which runs the steps from `first` to `boundary`, if required."""
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
        if self._is_requested or boundary >= self._end:
            self._is_requested = False
            self._report(boundary)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _start(self, step: int) -> None:
        try:
            tf.profiler.experimental.start(self._folder)
            self._since = step
        except tf.errors.AlreadyExistsError:
            self._print_line("The steps are not profiled, since another profile is being recorded.")

    def _stop(self) -> None:
        if self._since is not None:
            self._since = None
            tf.profiler.experimental.stop()

    def _report(self, end: int) -> None:
        first = self._since
        if first is None:
            return
        self._stop()
        path = find_newest(pathlib.Path(str(self._folder)))
        operations = costliest.list_operations(path)
        total = sum(seconds for _, seconds in operations) or 1.0
        shown = operations[:_SHOWN]
        self._on_event("profile", end, first=first, path=str(path), operations=shown)
        self._print_line(
            f"Profile of the steps {first} to {end}: {path.parent}. The operations that took the most "
            f"time, summed over threads or streams ({1e3 * total / (end - first):.2f} ms per step):"
        )
        for name, seconds in shown:
            per_step = 1e3 * seconds / (end - first)
            self._print_line(f"  {seconds / total:6.1%}  {per_step:9.3f} ms per step  {name}")


def find_newest(folder: pathlib.Path) -> pathlib.Path:
    """Returns the newest profile in a folder of summaries."""
    paths = folder.glob("plugins/profile/*/*.xplane.pb")
    newest: pathlib.Path = max(paths, key=lambda path: path.stat().st_mtime_ns)
    return newest
