"""The writers of MLflow and Weights & Biases: a resumed run continues the same run."""

import sys
import types

import pytest

from ctl.errors import UsageError
from ctl.loop.writers.servers import MlflowWriter, WandbWriter
from ctl.loop.writers.writer import Record

CONFIG = {"seed": 3, "train": {"steps": 20, "best": {"metric": ""}}}


@pytest.fixture
def wandb(monkeypatch):
    """A fake of the package: the arguments of `init`, and what its runs are called with."""
    calls = []

    class Run:
        def log(self, values):
            calls.append(values)

        def define_metric(self, name, step_metric=None):
            calls.append((name, step_metric))

        def finish(self, exit_code):
            calls.append(exit_code)

    def init(**arguments):
        calls.append(arguments)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


def test_wandb_has_one_axis_and_a_resumed_run_has_the_same_id(tmp_path, wandb):
    for is_new, status in ((True, "KILLED"), (False, "FINISHED")):
        writer = WandbWriter(tmp_path)
        writer.begin(CONFIG, is_new=is_new)
        writer.write(Record("eval", 10, {"loss": 0.5, "by_class": {"a": 1.0}}))
        writer.close(status)
    first, *rest = wandb[:5]
    assert (first["config"], first["name"], first["resume"]) == (CONFIG, tmp_path.name, "allow")
    assert rest == [
        ("step", None), ("*", "step"), {"step": 10, "eval/loss": 0.5, "eval/by_class/a": 1.0}, 1,
    ]  # fmt: skip
    assert wandb[5]["id"] == first["id"] and wandb[-1] == 0
    fresh = WandbWriter(tmp_path)
    fresh.begin(CONFIG, is_new=True)
    assert wandb[-3]["id"] != first["id"]


def test_mlflow_logs_each_step_once_to_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'server'}")
    workdir = tmp_path / "run"
    workdir.mkdir()
    for first, status in ((5, "KILLED"), (10, "FINISHED")):
        writer = MlflowWriter(workdir)
        writer.begin(CONFIG, is_new=first == 5)
        for step in range(first, first + 15, 5):
            writer.write(Record("train", step, {"loss": 1 / step}))
        writer.close(status)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(s, 1 / s) for s in (5, 10, 15, 20)]
    assert run.data.params["train.steps"] == "20" and run.info.status == "FINISHED"


def test_mlflow_that_cannot_log_to_its_place_is_one_line(tmp_path, monkeypatch):
    class MlflowException(Exception):
        pass

    def client():
        raise MlflowException("unsupported URI. Supported are http and others.")

    fake = types.SimpleNamespace(
        MlflowClient=client,
        exceptions=types.SimpleNamespace(MlflowException=MlflowException),
        get_tracking_uri=lambda: "sqlite:///mlflow.db",
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    line = r"cannot log to sqlite:///mlflow\.db \(unsupported URI\): set MLFLOW_TRACKING_URI"
    with pytest.raises(UsageError, match=line):
        MlflowWriter(tmp_path)
