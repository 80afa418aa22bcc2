"""Reads the state of a run from its workdir, while the run goes on or after it was killed."""

import json
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.loop.checkpoints.files import CheckpointFiles

# What metrics.jsonl has that depends on the machine: the beginnings of names.
_MEASURED = (
    "time",
    "examples_per_second",
    "milliseconds_per_step",
    "peak_memory_gib",
    "input_wait",
    "workers/",
)


class ProcessEvents:
    """What the current process of a run has recorded in events.jsonl so far."""

    def __init__(self, workdir: pathlib.Path, *, eval_interval: int):
        """Create it before the process starts: the events of earlier processes are skipped."""
        self._workdir = workdir
        self._eval_interval = eval_interval
        self._skipped = len(read_events(workdir))

    def events(self) -> list[dict]:
        """Returns the events that the process recorded."""
        return read_events(self._workdir)[self._skipped :]

    def made_progress(self) -> bool:
        """Whether the process itself reported a step."""
        return any(event["event"] in ("checkpoint", "eval") for event in self.events())

    @property
    def first_step(self) -> int | None:
        """The step that the process started from; None if it was killed before."""
        steps = [e["step"] for e in self.events() if e["event"] in ("start", "resume")]
        return steps[0] if steps else None

    def phase(self) -> str:
        """What the process is doing, or did when it was killed: start, step, save or eval.

        A save in the background takes precedence over what the main thread does.
        """
        if not self.made_progress():
            return "start"
        # Files of an unfinished save mean a save: a save first removes what an earlier process left
        # behind of the same step.
        if CheckpointFiles(self._workdir / "checkpoints").faults():
            return "save"
        last = self.events()[-1]
        eval_is_due = last["step"] % self._eval_interval == 0
        return "eval" if last["event"] == "checkpoint" and eval_is_due else "step"


def read_events(workdir: pathlib.Path) -> list[dict]:
    """Reads the complete lines of events.jsonl; the last line may still be being written."""
    try:
        text = (workdir / "events.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def latest_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the step of the latest complete checkpoint; 0 if there is none."""
    return max(CheckpointFiles(workdir / "checkpoints").steps(), default=0)


def read_weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads every variable of the latest checkpoint: weights, slots, counters."""
    path = CheckpointFiles(workdir / "checkpoints").path(latest_checkpoint(workdir))
    reader = tf.train.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
    return {name: reader.get_tensor(name) for name in names}


def read_metrics(workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """Reads the lines of metrics.jsonl, without what depends on the machine."""
    lines = map(json.loads, pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if not name.startswith(_MEASURED)}
        for line in lines
    ]
