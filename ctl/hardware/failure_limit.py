"""Detects that restarting a run does not help."""

import json
import pathlib

# Failures in a row without a new checkpoint after which the run is not restarted. Two machines in a row
# may be lost by chance; a program that fails with an exit code twice is likely to fail again.
_MAX_LOSSES, _MAX_FAILURES = 3, 2


class FailureLimit:
    """Detects a run that fails again and again without a new checkpoint.

    The cause is then probably the program and not a machine. If it is a machine, a restart does not
    help either, because each start computes the same steps again.

    Args:
        workdir: the workdir of the run, which need not exist yet.
    """

    def __init__(self, workdir: pathlib.Path):
        self._folder = workdir / "checkpoints"
        self._events = workdir / "events.jsonl"
        self._markers = self._read_markers()
        self._count = 0
        self.record_start()

    def record_start(self) -> None:
        """Records that the processes are started now."""
        self._beginnings = self._count_beginnings()
        self._old_markers = self._read_markers()

    def has_begun(self) -> bool:
        """Returns whether the run has begun to train since `record_start`."""
        return self._count_beginnings() > self._beginnings

    def has_saved(self) -> bool:
        """Returns whether the run has written a checkpoint since `record_start`."""
        return bool(self._read_markers() - self._old_markers)

    def is_reached(self, *, is_loss: bool) -> bool:
        """Records a failure, and returns whether the run should not be restarted.

        Args:
            is_loss: whether the exit code indicates that a worker was lost.
        """
        markers = self._read_markers()
        self._count = self._count + 1 if markers == self._markers else 1
        self._markers = markers
        return self._count >= (_MAX_LOSSES if is_loss else _MAX_FAILURES)

    def _count_beginnings(self) -> int:
        """Counts the events that the run writes after all checks of the config."""
        if not self._events.exists():
            return 0
        with self._events.open(encoding="utf-8", errors="replace") as file:
            return sum(_read_event(line) in ("start", "resume") for line in file)

    def _read_markers(self) -> set[str]:
        return {path.name for path in self._folder.glob("ckpt-*.whole")}


def _read_event(line: str) -> str:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):  # such as a line that a full disk has cut off
        return ""
