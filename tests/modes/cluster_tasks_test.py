"""The process whose task in TF_CONFIG is "evaluator" evaluates the checkpoints of the others."""

import json

import pytest

import ctl
from ctl import main
from ctl.configs.modes import MODES
from ctl.errors import Failure, UsageError
from ctl.loop.workdir import Workdir
from ctl.modes import cluster_tasks
from tests.support import experiments

CLUSTER = {"worker": ["a:1", "b:1"]}
EVALUATOR = json.dumps({"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}})
WORKER = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (EVALUATOR, True),
        (EVALUATOR.replace('"worker":', '"evaluator": ["e:1"], "worker":'), True),
        (WORKER, False), ("", False), ("{}", False), ('{"task": {"type": "worker"}}', False),
    ],
)  # fmt: skip
def test_evaluator_is_recognized_by_its_task(value, expected):
    assert cluster_tasks.is_evaluator({"TF_CONFIG": value}) is expected


def choose(name, *, task=EVALUATOR, fresh=False):
    config = ctl.config(
        runtime=dict(
            strategy="multi_worker_mirrored", all_reduce=dict(algorithm="ring", timeout=5.0),
            cluster=dict(start_timeout=3.0), precision="float64",
        )
    )  # fmt: skip
    return cluster_tasks.choose_mode(name, config, {"TF_CONFIG": task}, fresh=fresh), config.runtime


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train", "continuous_eval"), ("train_and_eval", "continuous_eval"),
        ("eval", "eval"), ("explain", "explain"), ("continuous_eval", "continuous_eval"),
    ],
)  # fmt: skip
def test_modes_that_train_become_continuous_eval_on_the_devices_of_this_machine(name, expected):
    mode, runtime = choose(name)
    assert mode is MODES[expected]
    assert (runtime.strategy, runtime.precision) == ("auto", "float64")
    assert runtime.all_reduce.to_dict() == ctl.config().runtime.all_reduce.to_dict()
    assert runtime.cluster.to_dict() == ctl.config().runtime.cluster.to_dict()
    mode, runtime = choose(name, task=WORKER)
    assert (mode, runtime.strategy) == (MODES[name], "multi_worker_mirrored")


def test_fresh_is_rejected():
    with pytest.raises(UsageError, match=r"evaluator of TF_CONFIG .*--fresh"):
        choose("train", fresh=True)


def test_evaluator_waits_for_the_run_and_names_the_folder_if_it_does_not_start(
    tmp_path, monkeypatch
):
    with pytest.raises(Failure, match=f"waited 0 s for a run in {tmp_path}.*start_timeout"):
        cluster_tasks.wait_for_run(Workdir(tmp_path), timeout=0.1)
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 2:
            (tmp_path / "config.json").touch()

    monkeypatch.setattr("time.monotonic", lambda: sum(sleeps))
    monkeypatch.setattr("time.sleep", sleep)
    cluster_tasks.wait_for_run(Workdir(tmp_path), timeout=30.0)
    assert len(sleeps) == 2 and 0 < sum(sleeps) < 20


@pytest.mark.slow
def test_the_command_of_the_others_evaluates_every_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    command = ["ctl", "--config=experiment.py", "--workdir=run", "--mode=train"]
    assert main.run(command) == 0
    monkeypatch.setenv("TF_CONFIG", EVALUATOR)
    assert main.run([*command, "--config.runtime.cluster.start_timeout=3.0"]) == 0
    assert "it runs --mode=continuous_eval" in capsys.readouterr().out
    steps = [step for name, step in experiments.read_events("run") if name == "eval"]
    assert steps == [10, 20, 30]
    assert experiments.read_result("run")["eval"]["examples"] == 50
