"""What result.json records of a run."""

import json
import types

import pytest

from ctl.modes import results

ENDED = ("start", "checkpoint", "end")
EVALUATED = {"step": 30, "eval": {"loss": 1.0}}
STOPPED = {**EVALUATED, "stopped": {"step": 30, "reason": "x"}}


@pytest.mark.parametrize(
    ("result", "options", "events", "complete"),
    [
        ({}, {}, ENDED, False),
        (EVALUATED | {"step": 20}, {}, ENDED, False),
        ({"step": 30}, {}, ENDED, False),
        ({"step": 30, "eval": None}, {}, ENDED, False),
        (EVALUATED, {}, ENDED, True),
        ({"step": 30}, {"evaluates": False}, ENDED, True),
        (EVALUATED, {"steps": 60}, ENDED, False),
        # An action has ended the run, which is complete unless that is changed.
        (STOPPED, {"steps": 60}, ENDED, True),
        (STOPPED, {"steps": 60, "step": 20}, ENDED, False),
        *(
            (STOPPED, {"steps": 60, "changes": [change]}, ENDED, complete)
            for change, complete in {
                "train.steps: 60 -> 90": True,
                "train.best.patience: 3 -> 5": False,
                "eval.interval: 5 -> 10": False,
                "actions: [] -> ['a.py:A']": False,
            }.items()
        ),
        # The last process did not end; --mode=continuous_eval has written the result.
        (EVALUATED, {}, ["start", "checkpoint"], False),
        (EVALUATED, {}, ["start", "stop"], False),
        (EVALUATED, {}, ["start", "end", "resume", "checkpoint"], False),
        (EVALUATED, {}, ["start", "stop", "resume", "end"], True),
        (EVALUATED, {}, ["start", "end", "checkpoint_eval"], True),
    ],
)
def test_run_is_complete_once_its_last_process_has_ended_with_a_result_of_the_last_step(
    tmp_path, result, options, events, complete
):
    lines = "".join(json.dumps({"event": event}) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines)
    workdir = types.SimpleNamespace(path=tmp_path, result=lambda: result)
    options = {"step": 30, "steps": 30, "evaluates": True, "changes": [], **options}
    assert results.is_complete(workdir, **options) == complete


def make_experiment(strategy, replicas):
    layout = types.SimpleNamespace(replicas=replicas)
    inner_loop = types.SimpleNamespace(plan=types.SimpleNamespace(layout=layout))
    trainer = types.SimpleNamespace(_ctl_loop=inner_loop)
    return types.SimpleNamespace(hardware=types.SimpleNamespace(name=strategy), trainer=trainer)


def make_controller(**fields):
    throughput = types.SimpleNamespace(examples_per_second=70.0)
    defaults = {
        "trained_step": 30, "outputs": {"loss": 0.5}, "evaluation": {"loss": 1.0},
        "reporter": types.SimpleNamespace(throughput=throughput),
        "actions": types.SimpleNamespace(stop_reason=None, results=dict),
    }  # fmt: skip
    return types.SimpleNamespace(**defaults | fields)


@pytest.mark.parametrize(("evaluated_step", "evaluation"), [(30, {"loss": 1.0}), (20, None)])
def test_result_has_only_an_evaluation_of_the_last_step(evaluated_step, evaluation):
    controller = make_controller(step=30, evaluated_step=evaluated_step)
    result = results.make_result(make_experiment("mirrored", 2), controller, 3.0)
    versions, host = result.pop("versions"), result.pop("host")
    assert host["CPU"] and int(host["threads"]) >= 1
    assert result == {
        "step": 30, "train": {"loss": 0.5}, "eval": evaluation, "examples_per_second": 70.0,
        "seconds": 3.0, "strategy": "mirrored", "replicas": 2,
    }  # fmt: skip
    assert {"tensorflow", "numpy"} <= versions.keys()


def test_result_says_why_an_action_ended_the_run_and_what_was_best():
    reason = {"step": 30, "reason": "eval/loss has not improved"}
    best = {"best": {"step": 20, "value": 0.5}}
    actions = types.SimpleNamespace(stop_reason=reason, results=lambda: best)
    # The best checkpoint was restored.
    controller = make_controller(
        step=20, evaluated_step=20, evaluation={"loss": 0.5}, actions=actions
    )
    result = results.make_result(make_experiment("default", 1), controller, 3.0)
    assert (result["step"], result["eval"]) == (30, {"loss": 0.5})
    assert result["stopped"] == reason and result["best"] == best["best"]
