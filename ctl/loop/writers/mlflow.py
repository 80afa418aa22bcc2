"""MlflowWriter: writes logged values to MLflow."""

from collections.abc import Mapping
import pathlib
from typing import Any

import mlflow

from ctl.configs import overrides
from ctl.loop import json_files
from ctl.loop.writers.writer import Record, Writer

_BATCH = 100  # parameters of one request of MLflow


class MlflowWriter(Writer):
    """Logs to the server that MLFLOW_TRACKING_URI names; metrics are called "split/name".

    The workdir holds the id of the MLflow run, so that a resumed run continues it. Records that an
    earlier process logged are not logged again, because MLflow would keep both.

    Args:
        workdir: the folder of the run.
    """

    required = False

    def __init__(self, workdir: pathlib.Path):
        self._path = workdir / "mlflow.json"
        self._name = workdir.name
        self._client = mlflow.MlflowClient()
        self._run_id: str | None = None
        self._logged: dict[str, int] = {}  # split -> the last step that the run has already

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Creates the MLflow run, or continues it."""
        if self._path.exists() and not is_new:
            self._run_id = json_files.read(self._path)["run_id"]
            mlflow.start_run(run_id=self._run_id)
            self._logged = self._read_last_steps()
            return
        # MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names the experiment.
        self._run_id = mlflow.start_run(run_name=self._name).info.run_id
        json_files.replace(self._path, {"run_id": self._run_id})
        items = [
            mlflow.entities.Param(k, str(v)[:500]) for k, v in overrides.flatten(config).items()
        ]
        for first in range(0, len(items), _BATCH):
            self._client.log_batch(self._run_id, params=items[first : first + _BATCH])

    def write(self, record: Record) -> None:
        """Logs the numbers of a record."""
        if self._run_id is None or record.step <= self._logged.get(record.split, -1):
            return
        metrics = [
            mlflow.entities.Metric(
                f"{record.split}/{name}", value, int(record.time * 1000), record.step
            )
            for name, value in record.numbers().items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, status: str) -> None:
        """Ends the run."""
        if self._run_id is not None:
            mlflow.end_run(status)

    def _read_last_steps(self) -> dict[str, int]:
        steps: dict[str, int] = {}
        for name in self._client.get_run(self._run_id).data.metrics:
            history = self._client.get_metric_history(self._run_id, name)
            split = name.partition("/")[0]
            steps[split] = max([steps.get(split, -1), *(metric.step for metric in history)])
        return steps
