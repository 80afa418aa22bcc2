"""WandbWriter: writes logged values to Weights & Biases."""

from collections.abc import Mapping
import pathlib
from typing import Any
import uuid

import wandb

from ctl.loop import json_files
from ctl.loop.writers.writer import Record, Writer


class WandbWriter(Writer):
    """Logs to the project of WANDB_PROJECT; metrics are called "split/name", their axis is "step".

    The workdir holds the id of the W&B run, so that a resumed run continues it.

    Args:
        workdir: the folder of the run.
    """

    required = False

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir
        self._run: Any = None

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Creates the run, or continues it."""
        path = self._workdir / "wandb.json"
        if is_new or not path.exists():
            json_files.replace(path, {"run_id": uuid.uuid4().hex[:12]})
        self._run = wandb.init(
            id=json_files.read(path)["run_id"],
            name=self._workdir.name,
            dir=str(self._workdir),
            config=dict(config),
            resume="allow",
        )
        # An axis of its own: the one of W&B counts calls, and rejects steps that are repeated.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Logs the numbers of a record."""
        if self._run:
            values = {f"{record.split}/{name}": v for name, v in record.numbers().items()}
            self._run.log({"step": record.step, **values})

    def close(self, status: str) -> None:
        """Ends the run."""
        if self._run:
            self._run.finish(exit_code=0 if status == "FINISHED" else 1)
