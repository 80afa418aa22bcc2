"""Sweeps whose values Optuna chooses; a function stands in for the runs."""

import json
import sys

import optuna
import pytest

from ctl.configs import flags
from ctl.errors import UsageError
from ctl.modes.sweep import search
from tests.support import experiments

GET_SWEEP = """
def get_sweep(trial):
    return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
"""


@pytest.fixture(autouse=True)
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG + GET_SWEEP})


def sweep(tmp_path, kind, entries, *, stop_at=-1):
    """Draws the runs, and records a loss that grows with the rate, but for the run `stop_at`."""
    values, changes = flags.parse(["ctl", "experiment.py", f"--sweep={kind}"])
    for run in search.choose_runs(values, changes, tmp_path, entries):
        entry = entries.setdefault(run.name, {"values": run.values, "status": "running"})
        if len(entries) == stop_at:
            return
        rate = float(run.values["optimizer.learning_rate"])
        entry.update(status="done", eval={"loss": rate})


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_resumed_search_makes_the_runs_of_the_undisturbed_one(tmp_path, kind):
    alone, resumed = {}, {}
    (tmp_path / "alone").mkdir()
    sweep(tmp_path / "alone", f"{kind}:14", alone)
    sweep(tmp_path, f"{kind}:14", resumed, stop_at=12)
    assert len(resumed) == 12
    sweep(tmp_path, f"{kind}:14", resumed)
    assert json.dumps(resumed) == json.dumps(alone)
    assert [name.partition(",")[0] for name in alone] == [f"trial={i}" for i in range(14)]


def test_tpe_prefers_values_with_good_results(tmp_path):
    entries = {}
    sweep(tmp_path, "tpe:30", entries)
    rates = [float(entry["values"]["optimizer.learning_rate"]) for entry in entries.values()]
    assert sum(rate < 1e-3 for rate in rates[20:]) >= 8  # half of them at random
    study = optuna.load_study(
        study_name=None,
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.journal"))
        ),
    )
    assert study.best_value == min(rates[:29])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("return {}", r"get_sweep\(trial\) returned a dict, but must return a dict of keys"),
        ("return {'sed': 1}", "There is no config key sed: did you mean seed?"),
        ("return 1 / 0", r"get_sweep\(\) fails: experiment.py:\d+: ZeroDivisionError"),
    ],
)
def test_mistake_is_one_line(tmp_path, text, message):
    function = f"\ndef get_sweep(trial):\n    {text}\n"
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG + function})
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        sweep(tmp_path, "random:2", {})


def test_missing_optuna_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"requires Optuna: pip install 'ctl-tensorflow\[sweep\]'"):
        sweep(tmp_path, "tpe:2", {})
