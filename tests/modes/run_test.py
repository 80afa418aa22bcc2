"""What a run consists of."""

import pathlib
import types

import pytest

from ctl.errors import UsageError
from ctl.modes.run import RunParts


def test_making_a_run_and_its_controller_writes_nothing(make_arguments):
    run = RunParts(make_arguments())
    controller = run.make_controller()
    assert controller.trainer is run.trainer and controller.checkpoints is run.checkpoints
    assert not pathlib.Path("run").exists()


def test_training_alone_needs_no_evaluator(make_arguments):
    assert RunParts(make_arguments(), evaluates=False).experiment.evaluator is None


@pytest.mark.parametrize(
    ("writing", "processes", "background"),
    [("auto", 1, True), ("background", 1, True), ("blocking", 1, False), ("auto", 2, False)],
)
def test_thread_writes_the_checkpoints_of_a_single_process(
    make_arguments, writing, processes, background
):
    run = RunParts(make_arguments({"train.checkpoint_writing": writing}))
    run.experiment = types.SimpleNamespace(
        hardware=types.SimpleNamespace(cluster=None if processes == 1 else object())
    )
    assert run._writes_in_background() == background


def test_several_processes_cannot_write_in_the_background(make_arguments):
    run = RunParts(make_arguments({"train.checkpoint_writing": "background"}))
    run.experiment = types.SimpleNamespace(hardware=types.SimpleNamespace(cluster=object()))
    with pytest.raises(UsageError, match=r"requires a run in one process: choose auto or blocking"):
        run._writes_in_background()


@pytest.mark.parametrize("is_chief", [True, False])
def test_every_process_has_the_rollbacks_of_the_chief(make_arguments, is_chief):
    decisions = [{"step": 13, "tensor": "the loss"}, {"step": 31}]

    class Processes:
        def broadcast_json_from_chief(self, value):
            assert value == (decisions if is_chief else [])
            return decisions

    run = RunParts(make_arguments())
    run.is_chief = is_chief
    run.processes = Processes()
    run.workdir.create(run.config.to_dict())
    if is_chief:
        run.workdir.write_rollbacks(decisions)
    policy = run.broadcast_rollback_policy()
    assert policy.steps == [13, 31]


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 0.5), ("cosine", 0.25)])
def test_restored_run_gets_a_constant_learning_rate_from_the_config(make_arguments, schedule, rate):
    keys = {"optimizer.schedule": "constant", "optimizer.learning_rate": 0.25}
    saved = RunParts(make_arguments(keys))
    path = saved.checkpoints.save()
    saved.checkpoints.wait()
    run = RunParts(make_arguments(keys | {"optimizer.learning_rate": 0.5}))
    run.config = run.config.copy_and_resolve_references()
    run.config.optimizer.schedule = schedule
    run.checkpoints.restore(path)
    assert float(run.trainer.optimizer.learning_rate) == rate
