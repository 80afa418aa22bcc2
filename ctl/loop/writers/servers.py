"""Writes logged values to MLflow and to Weights & Biases.

The workdir holds the id of the server's run, so that a resumed run continues it.
"""

from collections.abc import Mapping
import pathlib
from typing import Any
import uuid

from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.loop import json_files
from ctl.loop.writers.writer import Record, Writer

_BATCH = 100  # parameters of one request of MLflow


class MlflowWriter(Writer):
    """Logs to the server that MLFLOW_TRACKING_URI names; metrics are called "split/name".

    Records that an earlier process logged are not logged again, because MLflow would keep both.

    Args:
        workdir: the folder of the run.
    """

    required = False

    def __init__(self, workdir: pathlib.Path):
        import mlflow

        self._mlflow = mlflow
        try:
            self._client = mlflow.MlflowClient()
        except mlflow.exceptions.MlflowException as error:
            reason = str(error).partition(". ")[0]
            raise UsageError(
                f"MLflow cannot log to {mlflow.get_tracking_uri()} ({reason}): set "
                "MLFLOW_TRACKING_URI to the address of a server, or to sqlite:///mlflow.db with the "
                "package mlflow."
            ) from None
        self._path = workdir / "mlflow.json"
        self._run_id: str | None = None
        self._logged: dict[str, int] = {}  # split -> the last step that the run has already

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Creates the MLflow run, or continues it."""
        if self._path.exists() and not is_new:
            self._run_id = json_files.read(self._path, run_id=str)["run_id"]
            self._mlflow.start_run(run_id=self._run_id)
            self._logged = self._read_last_steps()
            return
        # MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names the experiment.
        name = self._path.parent.name
        self._run_id = self._mlflow.start_run(run_name=name).info.run_id
        json_files.replace(self._path, {"run_id": self._run_id})
        values = overrides.flatten(config).items()
        items = [self._mlflow.entities.Param(key, str(value)[:500]) for key, value in values]
        for first in range(0, len(items), _BATCH):
            self._client.log_batch(self._run_id, params=items[first : first + _BATCH])

    def write(self, record: Record) -> None:
        """Logs the numbers of a record."""
        if self._run_id is None or record.step <= self._logged.get(record.split, -1):
            return
        milliseconds, make = int(record.time * 1000), self._mlflow.entities.Metric
        metrics = [
            make(f"{record.split}/{name}", value, milliseconds, record.step)
            for name, value in record.numbers().items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, status: str) -> None:
        """Ends the run."""
        if self._run_id is not None:
            self._mlflow.end_run(status)

    def _read_last_steps(self) -> dict[str, int]:
        steps: dict[str, int] = {}
        for name in self._client.get_run(self._run_id).data.metrics:
            history = self._client.get_metric_history(self._run_id, name)
            split = name.partition("/")[0]
            steps[split] = max([steps.get(split, -1), *(metric.step for metric in history)])
        return steps


class WandbWriter(Writer):
    """Logs to the project of WANDB_PROJECT; metrics are called "split/name", their axis is "step".

    Args:
        workdir: the folder of the run.
    """

    required = False

    def __init__(self, workdir: pathlib.Path):
        import wandb

        self._init = wandb.init
        self._workdir = workdir
        self._run: Any = None

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Creates the run, or continues it."""
        path = self._workdir / "wandb.json"
        if is_new or not path.exists():
            json_files.replace(path, {"run_id": uuid.uuid4().hex[:12]})
        self._run = self._init(
            id=json_files.read(path, run_id=str)["run_id"],
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
