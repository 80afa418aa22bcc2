"""--mode=train and --mode=train_and_eval, called as functions."""

import json
import pathlib
import re
import types
from typing import ClassVar

import numpy as np
import pytest

from ctl.errors import UsageError
from ctl.modes import DONE, STOPPED, train
from tests.modes import shared
from tests.support import experiments


def test_train_does_not_evaluate_and_train_and_eval_does(make_arguments, make_complete):
    make_complete(train.train)
    assert experiments.read_result("run")["eval"] is None
    assert train.train_and_eval(make_arguments()) == DONE
    assert experiments.read_result("run")["eval"]["examples"] == 50


@pytest.mark.slow
def test_run_killed_before_its_last_evaluation_only_evaluates(make_arguments, make_complete):
    make_complete(train.train_and_eval)
    result = experiments.read_result("run")
    # As if killed in the last evaluation: the result is that of an earlier step.
    pathlib.Path("run/result.json").write_text(json.dumps(result | {"step": 5, "eval": None}))
    assert train.train_and_eval(make_arguments()) == DONE
    again = experiments.read_result("run")
    assert again["step"] == 10 and again["eval"] == result["eval"]
    assert again["train"] == result["train"]  # as the first process recorded it
    assert again["examples_per_second"] == result["examples_per_second"]


def test_complete_run_changes_nothing(make_complete, capsys):
    arguments = make_complete(train.train)
    before = shared.read_files()
    assert train.train(arguments) == DONE
    assert "This run is complete: 10 steps" in capsys.readouterr().out
    assert shared.read_files() == before


def test_rejected_checkpoint_leaves_the_config_of_the_run_as_it_was(make_arguments, make_complete):
    make_complete(train.train)
    before = pathlib.Path("run/config.json").read_text()
    changed = make_arguments({"optimizer.name": "sgd", "train.steps": 20}, allow_config_change=True)
    with pytest.raises(UsageError, match="does not match this trainer"):
        train.train(changed)
    assert pathlib.Path("run/config.json").read_text() == before
    assert not pathlib.Path("run/run.lock").exists()


@pytest.mark.slow
def test_run_does_not_resume_with_other_data_or_weights_unless_that_is_allowed(
    make_arguments, capsys
):
    rows, save = 50, np.savez

    def run(steps, **fields):
        keys = {"train.steps": steps, "init.checkpoint": "init.npz", "init.variables": "['head/*']"}
        arguments = make_arguments(keys, **fields)
        text = experiments.DROPOUT.replace("Dense(3)", "Dense(3, name='head')")
        text = text.replace("X[:, 0] >", f"X[:{rows}, 0] >").replace('"x": X,', f'"x": X[:{rows}],')
        text += "#" * rows  # bytecode of the same second and length would be used again
        experiments.write(".", {"experiment.py": text})
        save("init.npz", **{"head/kernel": np.ones([8, 3], "f"), "head/bias": np.ones(3, "f")})
        return train.train(arguments)

    assert run(5) == DONE
    before = experiments.read_events("run"), pathlib.Path("run/config.json").read_text()
    rows, save = 48, np.savez_compressed  # another size
    changes = (
        r"other data \(inputs.init.checkpoint: 'init.npz \(\d+ bytes\)' -> 'init.npz \(\d+ bytes\)';"
        r" inputs.train.examples: 50 -> 48\): resume .*--allow_config_change"
    )
    with pytest.raises(UsageError, match=changes):
        run(10)
    assert before == (experiments.read_events("run"), pathlib.Path("run/config.json").read_text())
    assert run(10, allow_config_change=True) == DONE
    assert "Changed since the run was started: inputs.train.examples: 50 -> 48" in (
        capsys.readouterr().out
    )
    config = json.loads(pathlib.Path("run/config.json").read_text())
    assert config.pop("inputs")["train"] == {"examples": 48}
    pathlib.Path("run/config.json").write_text(json.dumps(config))
    rows = 47
    assert run(12) == DONE  # a run of an older ctl has no record
    rows = 46
    assert run(12, fresh=True) == DONE


@pytest.mark.slow
def test_change_of_the_number_of_workers_is_printed_and_recorded(
    make_arguments, make_complete, capsys
):
    make_complete(train.train)
    path = pathlib.Path("run/events.jsonl")
    path.write_text(path.read_text().replace('"workers": 1', '"workers": 3'))
    for steps in (11, 12):
        train.train(make_arguments({"train.steps": steps}))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["workers"] for e in events if "workers" in e] == [3, 1, 1]
    (change,) = [event for event in events if event["event"] == "workers"]
    assert (change["step"], change["before"], change["after"]) == (10, 3, 1)
    assert capsys.readouterr().out.count("The number of workers has changed from 3 to 1.") == 1


class Ending(shared.Stopping):
    """Records its calls."""

    calls: ClassVar = []

    def __call__(self, outputs):
        self.calls.append(self.controller.step)
        super().__call__(outputs)

    def end(self):
        self.calls.append("end")


def test_run_that_is_stopped_at_its_last_step_ends_when_it_is_resumed(make_arguments):
    keys = {"actions": f"[{{'name': '{__name__}:Ending', 'step': 10}}]"}
    calls = Ending.calls
    calls.clear()
    assert train.train_and_eval(make_arguments(keys)) == STOPPED
    assert calls == [5, 10] and not pathlib.Path("run/result.json").exists()
    pathlib.Path("run/traceback.txt").write_text("of an earlier failure")
    assert train.train_and_eval(make_arguments(keys)) == DONE
    assert not pathlib.Path("run/traceback.txt").exists()
    assert calls == [5, 10, "end"] and experiments.read_result("run")["step"] == 10


def test_reason_of_a_stop_is_recorded(make_arguments):
    arguments = make_arguments()
    hook = "def train_loop_begin(self):\n        os.kill(os.getpid(), 15)\n\n    def build_model"
    text = f"import os\n{experiments.DROPOUT}".replace("def build_model", hook)
    experiments.write(".", {"experiment.py": text})
    assert train.train_and_eval(arguments) == STOPPED
    # Although it is requested before the first step, a loop is trained.
    assert experiments.read_events("run") == [("start", 0), ("checkpoint", 5), ("stop", 5)]
    last = json.loads(pathlib.Path("run/events.jsonl").read_text().splitlines()[-1])
    assert last["signal"] == "SIGTERM"


STOPPING = {
    **shared.STOPPING, "train.steps": 100, "eval.interval": 5, "train.best.patience": 2
}  # fmt: skip


@pytest.mark.slow
def test_early_stopping_ends_the_run_and_the_result_says_why(make_arguments, capsys):
    assert train.train_and_eval(make_arguments(STOPPING)) == DONE
    result = experiments.read_result("run")
    reason = result["stopped"]["reason"]
    assert re.fullmatch(
        r"eval/loss has not improved over [\d.]+ at step 5 for 2 evaluations", reason
    )
    assert result["step"] == result["stopped"]["step"] == 15
    assert result["best"]["step"] == 5 and result["best"]["restored"]
    assert result["eval"]["loss"] == result["best"]["value"]
    events = experiments.read_events("run")
    assert [event for event in events if event[0] not in ("checkpoint", "eval")] == [
        ("start", 0), ("best", 5), ("stop_requested", 15), ("end", 15),
    ]  # fmt: skip
    assert pathlib.Path("run/events.jsonl").read_text().count(f'"reason": "{reason}"') == 2
    capsys.readouterr()
    assert train.train_and_eval(make_arguments(STOPPING)) == DONE
    assert "This run is complete: it ended at step 15, because" in capsys.readouterr().out
    longer = STOPPING | {"train.best.patience": 3}
    assert train.train_and_eval(make_arguments(longer)) == DONE
    assert experiments.read_result("run")["stopped"]["step"] == 20


@pytest.mark.slow
def test_time_limit_ends_the_run_after_a_loop_with_an_evaluation(make_arguments, monkeypatch):
    now = iter(range(10_000))  # each reading of the clock is a second later
    clock = types.SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("ctl.loop.actions.stopping.time", clock)
    limit = {"train.steps": 100, "train.max_duration": "3 seconds"}
    limit["actions"] = f"['{shared.__name__}:Killing']"
    with pytest.raises(shared.Killed):
        train.train_and_eval(make_arguments(limit))
    assert train.train_and_eval(make_arguments(limit)) == DONE  # without another step
    result = experiments.read_result("run")
    assert result["step"] == 15 and result["eval"]["examples"] == 50
    assert result["stopped"] == {"step": 15, "reason": "train.max_duration=3 seconds has passed"}
    assert json.loads(pathlib.Path("run/config.json").read_text())["train"]["max_duration"]
    longer = limit | {"train.max_duration": "7 seconds"}
    assert train.train_and_eval(make_arguments(longer)) == DONE
    assert 15 < experiments.read_result("run")["step"] < 100


@pytest.mark.parametrize(
    ("keys", "mode", "message"),
    [
        ({}, train.train, "eval/loss requires evaluations: use --mode=train_and_eval"),
        (
            {"train.best.metric": "eval/acuracy"},
            train.train_and_eval,
            "The evaluation has no metric eval/acuracy: did you mean eval/accuracy",
        ),
        (
            {"eval.splits": "['eval', 'test']"},
            train.train_and_eval,
            "no metric eval/loss: eval.splits has several splits, so name one, as in eval/eval/loss",
        ),
    ],
)
def test_metric_that_is_not_evaluated_is_rejected_before_anything_changes(
    make_arguments, make_complete, keys, mode, message
):
    make_complete(train.train)
    before = sorted(pathlib.Path(".").rglob("*"))
    with pytest.raises(UsageError, match=message):
        mode(make_arguments(STOPPING | keys, fresh=True))
    assert sorted(pathlib.Path(".").rglob("*")) == before


def test_actions_of_the_trainer_and_of_the_config_are_called(make_arguments, capsys):
    text = """
    def build_actions(self):
        class Hello(ctl.Action):
            def __call__(self, outputs):
                print("hello", self.controller.step, self.controller.workdir, outputs["examples"])

        return [Hello()]

    def build_metrics"""
    arguments = make_arguments({"actions": '[{"name": "mine.py:make", "word": "by config"}]'})
    text = experiments.DROPOUT.replace("\n    def build_metrics", text)
    mine = "def make(word):\n    return lambda o: print(word)\n"
    experiments.write(".", {"mine.py": mine, "experiment.py": text})
    assert train.train_and_eval(arguments) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("by config") < lines.index("hello 10 run 50")
