"""What result.json records of a run."""

import json
import types

import pytest

import ctl
from ctl.modes import results


@pytest.fixture
def make_workdir(tmp_path):
    """Makes a workdir of a result and the events of its processes."""

    def make(result, *events):
        lines = "".join(json.dumps({"event": event}) + "\n" for event in events)
        (tmp_path / "events.jsonl").write_text(lines)
        return types.SimpleNamespace(path=tmp_path, result=lambda: result)

    return make


@pytest.mark.parametrize(
    ("result", "evaluates", "complete"),
    [
        ({}, True, False),
        ({"step": 20, "eval": {"loss": 1.0}}, True, False),
        ({"step": 30}, True, False),
        ({"step": 30, "eval": None}, True, False),
        ({"step": 30, "eval": {"loss": 1.0}}, True, True),
        ({"step": 30}, False, True),
    ],
)
def test_run_is_complete_once_its_last_step_has_a_result(result, evaluates, complete, make_workdir):
    workdir = make_workdir(result, "start", "checkpoint", "end")
    is_complete = results.is_complete(workdir, 30, steps=30, evaluates=evaluates, changes=[])
    assert is_complete == complete
    assert not results.is_complete(workdir, 30, steps=60, evaluates=evaluates, changes=[])


@pytest.mark.parametrize(
    ("step", "changes", "complete"),
    [
        (30, [], True),
        (30, ["train.steps: 60 -> 90", "runtime.xla: 'off' -> 'auto'"], True),
        (30, ["train.early_stopping.patience: 3 -> 5"], False),
        (30, ["eval.interval: 5 -> 10"], False),
        (30, ["actions: [] -> ['a.py:A']"], False),
        (20, [], False),
    ],
)
def test_run_that_an_action_has_ended_is_complete_unless_that_is_changed(
    step, changes, complete, make_workdir
):
    result = {"step": 30, "eval": {"loss": 1.0}, "stopped": {"step": 30, "reason": "x"}}
    workdir = make_workdir(result, "start", "stop_requested", "end")
    is_complete = results.is_complete(workdir, step, steps=60, evaluates=True, changes=changes)
    assert is_complete == complete


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        (["start", "checkpoint"], False),  # killed after its last checkpoint
        (["start", "stop"], False),
        (["start", "end", "resume", "checkpoint"], False),
        (["start", "stop", "resume", "end"], True),
        (["start", "end", "checkpoint_eval"], True),
    ],
)
def test_run_whose_last_process_did_not_end_is_not_complete(events, complete, make_workdir):
    # The result as --mode=continuous_eval writes it for the last checkpoint.
    workdir = make_workdir({"step": 30, "eval": {"loss": 1.0}}, *events)
    assert results.has_ended(workdir) == complete
    is_complete = results.is_complete(workdir, 30, steps=30, evaluates=True, changes=[])
    assert is_complete == complete


def make_experiment(strategy, replicas, source=None):
    engine = types.SimpleNamespace(
        plan=types.SimpleNamespace(layout=types.SimpleNamespace(replicas=replicas)),
        pipeline=types.SimpleNamespace(training_source=lambda: source),
    )
    trainer = types.SimpleNamespace(
        _ctl_engine=engine, global_batch_size=10, options=ctl.TrainerOptions(seed=3)
    )
    return types.SimpleNamespace(hardware=types.SimpleNamespace(name=strategy), trainer=trainer)


@pytest.mark.parametrize(("evaluated_step", "evaluation"), [(30, {"loss": 1.0}), (20, None)])
def test_result_has_only_an_evaluation_of_the_last_step(evaluated_step, evaluation):
    controller = types.SimpleNamespace(
        step=30,
        trained_step=30,
        actions=types.SimpleNamespace(stop_reason=None, results=dict),
        outputs={"loss": 0.5},
        evaluation={"loss": 1.0},
        evaluated_step=evaluated_step,
        reporter=types.SimpleNamespace(throughput=types.SimpleNamespace(examples_per_second=70.0)),
    )
    result = results.make_result(make_experiment("mirrored", 2), controller, 3.0)
    versions, host = result.pop("versions"), result.pop("host")
    assert host["CPU"] and int(host["threads"]) >= 1
    assert result == {
        "step": 30,
        "train": {"loss": 0.5},
        "eval": evaluation,
        "examples_per_second": 70.0,
        "seconds": 3.0,
        "strategy": "mirrored",
        "replicas": 2,
    }
    assert {"tensorflow", "numpy"} <= versions.keys()


def test_result_says_why_an_action_ended_the_run_what_was_best_and_what_was_mixed():
    reason = {"step": 30, "reason": "eval/loss has not improved"}
    best = {"best": {"step": 20, "value": 0.5}}
    controller = types.SimpleNamespace(
        step=20,  # the best checkpoint was restored
        trained_step=30,
        actions=types.SimpleNamespace(stop_reason=reason, results=lambda: best),
        outputs={},
        evaluation={"loss": 0.5},
        evaluated_step=20,
        reporter=types.SimpleNamespace(throughput=types.SimpleNamespace(examples_per_second=None)),
    )
    numbers = ctl.data.arrays({"x": range(10)})
    mixture = ctl.data.mixture({"a": (numbers, 1), "b": (numbers, 2)})
    result = results.make_result(make_experiment("default", 1, mixture), controller, 3.0)
    assert result["sources"] == mixture.count_examples(300, seed=3)
    assert (result["step"], result["eval"]) == (30, {"loss": 0.5})
    assert result["stopped"] == reason and result["best"] == best["best"]


def test_training_of_an_earlier_process_is_read_without_the_rest():
    result = {"step": 30, "train": {"loss": 0.5}, "examples_per_second": 70.0, "seconds": 3.0}
    workdir = types.SimpleNamespace(result=lambda: result)
    training = {"train": {"loss": 0.5}, "examples_per_second": 70.0}
    assert results.read_training(workdir) == training
