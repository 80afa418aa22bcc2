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
from ctl.loop.actions.best_checkpoint import BestCheckpoint
from ctl.loop.actions.stopping import EarlyStopping, StopAtTarget, TimeLimit
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.loop.shared import control, make_reference, share
from tests.support.faults.kills import killing

NAN = float("nan")


@pytest.fixture
def feed(fake_controller):
    """Calls an action with a value after every 10 steps; returns the number of calls until it stops."""

    def call(action, *values):
        action.controller = fake_controller
        for number, value in enumerate(values, 1):
            fake_controller.step = 10 * number
            action({"x": value})
            if action.stop_reason:
                return number
        return None

    return call


@pytest.mark.parametrize(
    ("values", "options", "evaluations"),
    [
        ([0.5, 0.5], {"patience": 1}, 2),  # a tie is no improvement
        ([NAN, 0.5, 0.6, NAN, 0.6], {}, 5),
        ([NAN, NAN, 0.5], {}, 2),
        ([0.5, 0.625, 0.75, 0.875], {"min_delta": 0.25}, 3),  # at most min_delta does not count
    ],
)
def test_run_ends_after_patience_evaluations_in_a_row_without_an_improvement(
    feed, values, options, evaluations
):
    action = EarlyStopping("eval/x", "max", **{"patience": 2, **options})
    assert feed(action, *values) == evaluations
    words = "for 1 evaluation" if "patience" in options else "for 2 evaluations"
    assert action.stop_reason.endswith(words)


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": NAN}])
def test_bad_arguments_are_rejected(options):
    with pytest.raises(ctl.UsageError, match="early_stopping: patience="):
        EarlyStopping("eval/loss", "min", **options)


@pytest.mark.parametrize(
    ("mode", "target", "calls"), [("max", 0.5, 3), ("min", 0.25, 1), ("max", 0.75, None)]
)
def test_a_value_as_good_as_the_target_ends_the_run(feed, mode, target, calls):
    action = StopAtTarget("eval/x", mode, target=target)
    assert feed(action, 0.25, NAN, 0.5, 0.25) == calls
    assert action.stop_reason == (f"eval/x has reached {target:g}" if calls else "")


class Killed(BaseException):
    """Stands for the end of the process."""


@contextlib.contextmanager
def kill(when):
    """Raises `Killed` at a point of `killing`."""

    def handler(*_):
        raise Killed

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with contextlib.suppress(Killed), killing(when, by=signal.SIGUSR1):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Scripted(ctl.StandardEvaluator):
    """Adds a score that is a function of the step: best at step 12, and NaN at first."""

    def eval_end(self):
        step = int(self.trainer.global_step.numpy())
        return {**super().eval_end(), "score": {4: NAN, 8: 0.5, 12: 0.75}.get(step, 0.625)}


def build_trainer():
    return make_reference(batch=7, optimizer=lambda: tf_keras.optimizers.Adam(1e-2))


make_trainer, make_evaluator = share(build_trainer), functools.cache(Scripted)


def run(folder, kill_at=None, *, patience=3, background=False, make=make_trainer):
    """One process of a run: trains until it ends or is killed. Returns the controller."""
    trainer = make()
    best = BestCheckpoint("eval/score", "max", folder=folder / "best", restore_at_end=True)
    controller = control(
        trainer, folder / "checkpoints", background=background, evaluator=make_evaluator(trainer),
        steps_per_loop=4, checkpoint_interval=8,
        actions=[best, EarlyStopping("eval/score", "max", patience=patience)],
    )  # fmt: skip
    controller.restore_checkpoint()
    with kill(kill_at) if kill_at else contextlib.nullcontext():
        controller.train_and_evaluate(60, eval_interval=4)
    return controller


def read_variables(path):
    reader = tf.train.load_checkpoint(str(path))
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {name: reader.get_tensor(name) for name in names}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder and the controller of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, run(folder, make=build_trainer)


def test_run_ends_with_the_best_weights(whole_run):
    folder, controller = whole_run
    reason = "eval/score has not improved over 0.7500 at step 12 for 3 evaluations"
    assert controller.actions.stop_reason == {"step": 24, "reason": reason}
    assert not controller.stopped and controller.trained_step == 24
    assert controller.step == controller.evaluated_step == 12
    assert controller.evaluation["score"] == 0.75
    assert controller.reporter.steps("best") == [("best", step) for step in (8, 12)]
    saved = [("checkpoint", step) for step in (8, 16, 24)]
    assert controller.reporter.steps("checkpoint") == saved
    assert {p.name for p in (folder / "best").glob("*.index")} == {"ckpt-12.index"}
    saved = read_variables(folder / "best/ckpt-12")["global_step/.ATTRIBUTES/VARIABLE_VALUE"]
    assert saved == 12


@pytest.mark.parametrize(
    "kills",
    [
        ["save:2"],  # in writing the first best checkpoint: the first save is that of step 8
        pytest.param(["save:3"], marks=pytest.mark.slow),  # in writing the second one
        ["step:13", "eval:5"],  # and in the evaluation that ends the run
    ],
)
def test_killed_run_ends_at_the_same_step_with_the_same_bits(whole_run, tmp_path, kills):
    for point in kills:
        run(tmp_path, point)
    folder, undisturbed = whole_run
    controller = run(tmp_path)
    assert controller.actions.stop_reason == undisturbed.actions.stop_reason
    assert controller.evaluation == undisturbed.evaluation
    for name in ("checkpoints/ckpt-24", "best/ckpt-12"):
        np.testing.assert_equal(read_variables(tmp_path / name), read_variables(folder / name))
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
    expected, actual = (
        read_variables(folder / "checkpoints/ckpt-24") for folder in (whole_run[0], tmp_path)
    )
    np.testing.assert_equal({key: actual[key] for key in expected}, expected)


def test_stop_is_requested_at_the_first_loop_after_the_time_of_all_processes(clock):
    first = TimeLimit("2 minutes")
    clock.now += 90
    state = first.get_state()
    assert state == {"seconds": 90.0}
    clock.now += 3600  # while no process trains
    second = TimeLimit("2 minutes")
    second.set_state(state)
    clock.now += 29
    second.set_state(state)  # of the checkpoint that a rollback restores, which gives no time back
    second({})
    assert not second.stop_reason
    clock.now += 1
    second({})
    assert second.stop_reason == "train.max_duration=2 minutes has passed"
