"""What result.json records of a run."""

import types

import pytest

from ctl.modes import results


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
def test_run_is_complete_once_its_last_step_has_a_result(result, evaluates, complete):
    workdir = types.SimpleNamespace(result=lambda: result)
    assert results.is_complete(workdir, 30, evaluates) == complete


@pytest.mark.parametrize(("evaluated_step", "evaluation"), [(30, {"loss": 1.0}), (20, None)])
def test_result_has_only_an_evaluation_of_the_last_step(evaluated_step, evaluation):
    controller = types.SimpleNamespace(
        step=30,
        outputs={"loss": 0.5},
        evaluation={"loss": 1.0},
        evaluated_step=evaluated_step,
        examples_per_second=70.0,
    )
    plan = types.SimpleNamespace(layout=types.SimpleNamespace(replicas=2))
    experiment = types.SimpleNamespace(
        hardware=types.SimpleNamespace(name="mirrored"),
        trainer=types.SimpleNamespace(_ctl_engine=types.SimpleNamespace(plan=plan)),
    )
    result = results.make_result(experiment, controller, 3.0)
    versions = result.pop("versions")
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


def test_training_of_an_earlier_process_is_read_without_the_rest():
    result = {"step": 30, "train": {"loss": 0.5}, "examples_per_second": 70.0, "seconds": 3.0}
    workdir = types.SimpleNamespace(result=lambda: result)
    training = {"train": {"loss": 0.5}, "examples_per_second": 70.0}
    assert results.read_training(workdir) == training
