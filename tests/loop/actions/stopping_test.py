"""When early stopping or a time limit ends a run, and that a kill does not change it."""

import contextlib
import functools
import json
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.actions.best_checkpoint import BestCheckpoint
from ctl.loop.actions.stopping import EarlyStopping, TimeLimit
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.controller import Controller
from ctl.loop.reporter import Reporter
from ctl.testing import faults
from tests import reference_model
from tests.loop.shared import share

NAN = float("nan")


def stopped_after(controller, values, **options):
    """The number of evaluations after which a run with these values ends; None if it does not."""
    controller.evaluator = None
    action = EarlyStopping("eval/x", "max", **options)
    action.controller = controller
    for number, value in enumerate(values, 1):
        controller.step = 10 * number
        action({"x": value})
        if action.stop_reason:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "patience", "evaluations"),
    [
        ([0.1, 0.2, 0.3, 0.4], 2, None),
        ([0.5, 0.4, 0.4], 2, 3),
        ([0.5, 0.4, 0.6, 0.5, 0.5], 2, 5),
        ([0.5, 0.5], 1, 2),  # a tie is no improvement
        ([0.5, 0.6], 1, None),
        ([NAN, 0.5, 0.6, NAN, 0.6], 2, 5),
        ([NAN, NAN, 0.5], 2, 2),
        ([NAN, 0.5, 0.4, 0.4], 2, 4),
    ],
)
def test_run_ends_after_patience_evaluations_in_a_row_without_an_improvement(
    fake_controller, values, patience, evaluations
):
    assert stopped_after(fake_controller, values, patience=patience) == evaluations


def test_an_improvement_of_at_most_min_delta_does_not_count(fake_controller):
    values = [0.5, 0.625, 0.75, 0.875]
    assert stopped_after(fake_controller, values, patience=2, min_delta=0.0) is None
    assert stopped_after(fake_controller, values, patience=2, min_delta=0.25) == 3


def test_reason_names_the_metric_the_best_value_and_its_step(fake_controller):
    action = EarlyStopping("eval/x", "min", patience=1)
    action.controller = fake_controller
    for step, value in ((10, 0.5), (20, 0.625)):
        fake_controller.step = step
        action({"x": value})
    assert action.stop_reason == "eval/x has not improved over 0.5000 at step 10 for 1 evaluation"


def test_repeated_evaluation_is_counted_once_and_a_larger_patience_continues(fake_controller):
    action = EarlyStopping("eval/x", "max", patience=2)
    action.controller = fake_controller
    for step in (10, 20, 20, 20):
        fake_controller.step = step
        action({"x": 0.5})
    assert not action.stop_reason
    resumed = EarlyStopping("eval/x", "max", patience=1)
    resumed.controller = fake_controller
    resumed.set_state(json.loads(json.dumps(action.get_state())))
    resumed({"x": 0.5})
    assert resumed.stop_reason


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": NAN}])
def test_bad_arguments_are_rejected(options):
    with pytest.raises(ctl.UsageError, match="early_stopping: patience="):
        EarlyStopping("eval/loss", "min", **options)


class Killed(BaseException):
    """Stands for the end of the process."""


@contextlib.contextmanager
def kill(when):
    """Raises `Killed` at a point of `faults.killing`."""

    def handler(*_):
        raise Killed

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with contextlib.suppress(Killed), faults.killing(when, by=signal.SIGUSR1):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Scripted(ctl.StandardEvaluator):
    """Adds a score that is a function of the step: best at step 12, and NaN at first."""

    def eval_end(self):
        step = int(self.trainer.global_step.numpy())
        return {**super().eval_end(), "score": {4: NAN, 8: 0.5, 12: 0.75}.get(step, 0.625)}


def build_trainer():
    return reference_model.make_trainer(
        testing.make_strategy(1), 7, optimizer=lambda: tf_keras.optimizers.Adam(1e-2)
    )


make_trainer, make_evaluator = share(build_trainer), functools.cache(Scripted)


def run(folder, kill_at=None, *, patience=3, background=False, make=make_trainer):
    """One process of a run: trains until it ends or is killed. Returns controller and events."""
    trainer, events = make(), []
    controller = Controller(
        trainer=trainer,
        evaluator=make_evaluator(trainer),
        steps_per_loop=4,
        checkpoints=Checkpointer(folder / "checkpoints", trainer, background=background),
        checkpoint_interval=8,
        reporter=Reporter(trainer, on_event=lambda name, step, **_: events.append((name, step))),
        actions=[
            BestCheckpoint("eval/score", "max", folder=folder / "best", restore_at_end=True),
            EarlyStopping("eval/score", "max", patience=patience),
        ],
    )
    controller.restore_checkpoint()
    with kill(kill_at) if kill_at else contextlib.nullcontext():
        controller.train_and_evaluate(60, eval_interval=4)
    return controller, events


def read_variables(path):
    reader = tf.train.load_checkpoint(str(path))
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {name: reader.get_tensor(name) for name in names}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder, the controller and the events of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, *run(folder, make=build_trainer)


def test_run_ends_with_the_best_weights(whole_run):
    folder, controller, events = whole_run
    reason = "eval/score has not improved over 0.7500 at step 12 for 3 evaluations"
    assert controller.actions.stop_reason == {"step": 24, "reason": reason}
    assert not controller.stopped and controller.trained_step == 24
    assert controller.step == controller.evaluated_step == 12
    assert controller.evaluation["score"] == 0.75
    assert [step for name, step in events if name == "best"] == [8, 12]
    assert [step for name, step in events if name == "checkpoint"] == [8, 16, 24]
    assert {p.name for p in (folder / "best").glob("*.index")} == {"ckpt-12.index"}
    saved = read_variables(folder / "best/ckpt-12")["global_step/.ATTRIBUTES/VARIABLE_VALUE"]
    assert saved == 12


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(
            ["eval:3"], marks=pytest.mark.slow
        ),  # in the evaluation that finds the best value
        ["save:2"],  # in writing the first best checkpoint: the first save is that of step 8
        ["save:3"],  # in writing the second one
        pytest.param(["step:13", "step:18", "step:23"], marks=pytest.mark.slow),
        ["eval:6"],  # in the evaluation that ends the run
    ],
)
def test_killed_run_ends_at_the_same_step_with_the_same_bits(whole_run, tmp_path, kills):
    for point in kills:
        run(tmp_path, point)
    folder, undisturbed_controller, _ = whole_run
    controller, _ = run(tmp_path)
    assert controller.actions.stop_reason == undisturbed_controller.actions.stop_reason
    assert controller.evaluation == undisturbed_controller.evaluation
    for name in ("checkpoints/ckpt-24", "best/ckpt-12"):
        expected, actual = read_variables(folder / name), read_variables(tmp_path / name)
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(actual[key], value, err_msg=key)
    for name in ("checkpoints/ckpt-16.whole", "best/ckpt-12.whole"):
        markers = [json.loads((path / name).read_text()) for path in (folder, tmp_path)]
        assert markers[0]["notes"] == markers[1]["notes"]


def test_best_weights_are_not_restored_into_the_checkpoint_that_a_thread_still_writes(
    whole_run, tmp_path, monkeypatch
):
    commit = CheckpointFiles.commit

    def slow(files, step, notes=None):
        time.sleep(0.2 * (step == 24))
        commit(files, step, notes)

    monkeypatch.setattr(CheckpointFiles, "commit", slow)
    run(tmp_path, background=True)
    assert CheckpointFiles(tmp_path / "checkpoints").steps() == [8, 16, 24]
    expected = read_variables(whole_run[0] / "checkpoints/ckpt-24")
    actual = read_variables(tmp_path / "checkpoints/ckpt-24")
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


def test_run_that_has_ended_continues_with_a_larger_patience(whole_run, tmp_path):
    run(tmp_path, patience=1)
    controller, _ = run(tmp_path, patience=3)
    assert controller.actions.stop_reason == whole_run[1].actions.stop_reason


@pytest.mark.slow
def test_rollback_repeats_the_evaluations_since_the_checkpoint(tmp_path):
    """A step that is not finite after an evaluation restores the states from before it."""
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 7, cls=PoisonedAt14, on_non_finite="rollback",
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
    )  # fmt: skip
    action = EarlyStopping("eval/score", "max", patience=3)
    controller = Controller(
        trainer=trainer, evaluator=Scripted(trainer), steps_per_loop=4,
        checkpoints=Checkpointer(tmp_path, trainer), checkpoint_interval=8, actions=[action],
    )  # fmt: skip
    controller.train_and_evaluate(60, eval_interval=4)
    assert controller.actions.stop_reason["step"] == 24
    assert action.get_state() == {"best": 0.75, "best_step": 12, "count": 3, "step": 24}


@pytest.mark.slow
def test_rollback_without_evaluations_trains_to_the_end(tmp_path):
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 7, cls=PoisonedAt14, on_non_finite="rollback"
    )
    controller = Controller(
        trainer=trainer,
        steps_per_loop=4,
        checkpoints=Checkpointer(tmp_path, trainer),
        actions=[print],
    )
    controller.train(20)
    assert controller.step == 20 and controller.checkpoints.latest_step() == 20


class PoisonedAt14(reference_model.ReferenceTrainer):
    def preprocess(self, batch):
        batch = super().preprocess(batch)
        rows = ctl.replica.current()
        if rows is None:
            return batch
        factor = tf.where(tf.equal(rows.step, 14), tf.constant(NAN, batch["x"].dtype), 1)
        return {**batch, "x": batch["x"] * factor}


def test_stop_is_requested_at_the_first_loop_after_the_time(clock):
    limit = TimeLimit("2 minutes")
    for clock.now in (150.0, 219.0):
        limit({})
        assert not limit.stop_reason
    clock.now = 221.0
    limit({})
    assert limit.stop_reason == "train.max_duration=2 minutes has passed"


def test_time_of_earlier_processes_counts(clock):
    first = TimeLimit("2 minutes")
    clock.now += 90
    state = first.get_state()
    assert state == {"seconds": 90.0}
    clock.now += 3600  # while no process trains
    second = TimeLimit("2 minutes")
    second.set_state(state)
    clock.now += 29
    second({})
    assert not second.stop_reason
    clock.now += 1
    second({})
    assert second.stop_reason


def test_rollback_does_not_give_time_back(clock):
    limit = TimeLimit("2 minutes")
    clock.now += 60
    state = limit.get_state()
    clock.now += 50
    limit.set_state(state)  # of the checkpoint that the rollback restores
    assert limit.get_state() == {"seconds": 110.0}


def test_duration_must_be_a_time():
    with pytest.raises(ctl.UsageError, match="is '5 epochs', but must be a time"):
        TimeLimit("5 epochs")
