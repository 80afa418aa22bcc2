"""Boundaries at absolute steps, what a resumed run does, and when a run stops."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import evaluator
from ctl.built.inner_loop import loop_of
from ctl.errors import Failure
from ctl.loop import controller
from ctl.loop.controller import Controller, next_boundary
from ctl.loop.metric_log import MetricLog
from ctl.loop.stop import StopRequest
from ctl.loop.timing import Every
from ctl.loop.workdir import Workdir
from ctl.loop.writers.json_lines import JsonLinesWriter
from tests.loop.shared import OtherProcesses, control, make_reference, share
from tests.support import reference_model
from tests.support.faulty_trainers import jumping, same, state


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.4


def adam():
    schedule = tf_keras.optimizers.schedules.CosineDecay(1e-2, 40)
    return tf_keras.optimizers.Adam(schedule)


class StopAt(StopRequest):
    """A stop that is requested once a step is reached; counts how often it is checked."""

    def __init__(self, trainer, step):
        super().__init__()
        self._trainer, self._step = trainer, step
        self.checked_at = []

    @property
    def requested(self):
        step = int(self._trainer.global_step.numpy())
        self.checked_at.append(step)
        return self._step is not None and step >= self._step


@share
def make_trainer(replicas):
    return make_reference(replicas, 7, cls=Dropping, optimizer=adam)


make_evaluator = functools.cache(ctl.StandardEvaluator)


@pytest.fixture
def make(tmp_path):
    """Makes a controller over the folder, as a new process would; its reporter records.

    It has the trainer of the controllers that were made before.
    """

    def build(replicas=1, *, stop_at=None, **options):
        trainer = make_trainer(replicas)
        options = {"steps_per_loop": 5, "stop": StopAt(trainer, stop_at), **options}
        evaluator = make_evaluator(trainer)
        return control(trainer, tmp_path / "checkpoints", evaluator=evaluator, **options)

    return build


def steps(controller, name):
    return [step for _, step in controller.reporter.steps(name)]


def test_interrupted_run_ends_with_the_same_bits_and_on_other_replicas_within_rounding(make):
    uninterrupted = make(2)
    uninterrupted.train(20, checkpoint_at_completion=False)
    expected = state(uninterrupted.trainer)
    make(2, stop_at=8, steps_per_loop=4).train(20)
    for replicas in (2, 1):
        resumed = make(replicas, steps_per_loop=3)
        resumed.restore_checkpoint()
        assert resumed.step == 8
        resumed.train(20, checkpoint_at_completion=False)
        for one, actual in zip(expected, state(resumed.trainer), strict=True):
            np.testing.assert_allclose(one, actual, rtol=0, atol=0 if replicas == 2 else 1e-10)


def test_stop_is_honored_inside_an_evaluation(make, monkeypatch):
    monkeypatch.setattr(evaluator, "STEPS_BETWEEN_CHECKS", 2)
    controller = make()
    stop = controller.stop = StopAt(controller.trainer, None)

    def any_process_stops():
        stop._step = 10  # requested after the second loop, at the first check of the evaluation
        return stop.requested

    monkeypatch.setattr(controller, "any_process_stops", any_process_stops)
    assert controller.train_and_evaluate(20, eval_interval=10) is None
    assert controller.stopped and controller.step == 10
    assert stop.checked_at == [5, 10, 10]
    assert controller.reporter.steps() == [("checkpoint", 10)]
    resumed = make()
    resumed.restore_checkpoint()
    outputs = resumed.train_and_evaluate(20, eval_interval=10)
    assert outputs["examples"] == reference_model.EXAMPLES


def test_checkpoint_and_evaluation_that_are_due_by_time_are_at_the_end_of_a_loop(make, monkeypatch):
    now = {0: 0.0, 5: 30.0, 8: 60.0, 10: 61.0, 15: 119.0, 16: 120.0, 20: 121.0}
    trainer = make_trainer(1)
    monkeypatch.setattr("time.monotonic", lambda: now[int(trainer.global_step)])
    controller = make(checkpoint_interval=Every(seconds=60.0))
    controller.train(20, checkpoint_at_completion=False)
    assert steps(controller, "checkpoint") == [10, 20]
    controller = make(checkpoint_interval=8)
    controller.train_and_evaluate(20, eval_interval=Every(15, 60.0))
    # By time at 8, and 60 s after that of step 15 not before the end; by steps at 15; at the end.
    assert controller.reporter.steps() == [
        ("checkpoint", 8), ("eval", 8), ("eval", 15), ("checkpoint", 16), ("checkpoint", 20),
        ("eval", 20),
    ]  # fmt: skip


def test_three_intervals_keep_their_multiples_through_stops_at_any_step(make):
    """Intervals of 3, 4 and 7 steps, a run that is stopped and resumed at every loop's end."""
    events, stop_at = [], 0
    while True:
        stop_at += 1
        # With an action, the evaluation of a step that the run was stopped at is made up for.
        actions = [ctl.as_action(lambda outputs: None, at="eval")]
        options = dict(checkpoint_interval=4, steps_per_loop=3, actions=actions)
        controller = make(stop_at=stop_at, **options)
        controller.restore_checkpoint()
        if controller.step == 24:
            controller.evaluate()
        else:
            controller.train_and_evaluate(24, eval_interval=7)
        events += controller.reporter.steps()
        stop_at = controller.step
        if not controller.stopped:
            break
    assert [step for event, step in events if event == "eval"] == [7, 14, 21, 24]
    ends_of_loops = [step for event, step in events if event == "checkpoint"]
    assert ends_of_loops == [3, 4, 6, 7, 8, 9, 12, 14, 15, 16, 18, 20, 21, 24]


@pytest.mark.parametrize(("other_stops", "chief_is_due"), [(True, False), (False, True)])
def test_processes_decide_together_whether_to_stop_and_to_save(make, other_stops, chief_is_due):
    """This process has no reason to stop, and another clock than the chief, whose answer counts."""
    processes = OtherProcesses(of_chief=chief_is_due, stops=other_stops)
    every = Every(seconds=1e9 if chief_is_due else 1e-9)
    controller = make(checkpoint_interval=every, processes=processes)
    controller.train(10, checkpoint_at_completion=False)
    assert controller.step == (5 if other_stops else 10)
    assert controller.stopped == other_stops
    saved = steps(controller, "checkpoint")
    assert saved == ([5, 10] if chief_is_due else [5])
    gathered = [value for name, value in processes.calls if name == "gather"]
    assert all(seconds > 0 for seconds, *_ in gathered)
    boundary = ["gather", ("broadcast_from_chief", not chief_is_due), ("any_process", False)]
    calls = [name if name == "gather" else (name, value) for name, value in processes.calls]
    assert calls == boundary * (controller.step // 5)


class StopAfter(ctl.Action):
    """Requests a stop at a step; its state is the number of its calls."""

    def __init__(self, step, at="train"):
        self.step, self.at, self.calls = step, at, 0

    def __call__(self, outputs):
        assert isinstance(outputs["loss"], float)
        self.calls += 1
        if self.controller.step >= self.step:
            self.request_stop("it is enough")

    def get_state(self):
        return {"calls": self.calls}

    def set_state(self, state):
        self.calls = state["calls"]


def test_run_that_an_action_ends_in_training_is_saved_and_evaluated(make):
    controller = make(actions=[StopAfter(10)])
    outputs = controller.train_and_evaluate(100, eval_interval=40)
    assert outputs["examples"] == reference_model.EXAMPLES and not controller.stopped
    assert controller.actions.stop_reason == {"step": 10, "reason": "it is enough"}
    assert controller.reporter.steps() == [("stop_requested", 10), ("checkpoint", 10), ("eval", 10)]


def test_state_of_an_action_is_restored_with_the_checkpoint(make, tmp_path):
    make(actions=[StopAfter(99)], stop_at=10).train(100)
    action = StopAfter(20)
    controller = make(actions=[action])
    controller.restore_checkpoint()
    assert action.calls == 2
    controller.train(100)
    assert action.calls == 4 and controller.step == 20
    # A run without the action resumes from the same checkpoint, and its own have no state.
    other = make()
    other.restore_checkpoint()
    other.train(25)
    assert "actions" in (tmp_path / "checkpoints/ckpt-20.whole").read_text()
    assert "actions" not in (tmp_path / "checkpoints/ckpt-25.whole").read_text()


def test_loss_that_is_not_finite_in_a_step_of_the_users_own_ends_the_run(tmp_path):
    class Own(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return tf.constant(float("nan"), tf.float64)

    controller = control(make_reference(cls=Own), tmp_path)
    with pytest.raises(Failure, match=r"step 5 is nan. Nothing"):
        controller.train(5)
    assert controller.checkpoints.latest_step() is None


def test_loop_of_which_all_steps_are_skipped_reports_no_loss_and_goes_on(tmp_path):
    trainer = make_reference(precision="float16", loss_scale=1e30)
    controller = control(trainer, reporter={"total": 4}, steps_per_loop=2)
    controller.train(4)
    assert controller.outputs == {"loss_scale": pytest.approx(1e30), "skipped_steps": 4}
    line = controller.reporter.lines[0]
    assert line.startswith("train       2/4 | loss_scale 1.000e+30 | skipped_steps 2")


def test_weight_that_is_not_finite_is_not_saved(make, tmp_path):
    controller = make()
    controller.train(5)
    weight = controller.trainer.model.trainable_variables[1]
    weight.assign(weight / 0.0)
    with pytest.raises(Failure, match="not finite after step 5"):
        controller._manager.saved_step = None
        controller.save_checkpoint()


@pytest.mark.parametrize(
    ("step", "end", "intervals", "others", "boundary"),
    [
        (0, 100, (10,), (), 10),
        (10, 100, (10,), (), 20),  # a boundary itself is over
        (13, 100, (10, 7), (), 14),
        (95, 98, (10, 0), (), 98),
        (13, 100, (10,), (18, 13, 12), 18),
        (13, 100, (10,), (21,), 20),
    ],
)
def test_boundary_is_the_first_multiple_of_any_interval_up_to_the_end(
    step, end, intervals, others, boundary
):
    every = [Every(steps) for steps in intervals]
    assert next_boundary(step, end, *every, Every(at=others)) == boundary


STEPS = 8


def run(folder, trainer, steps=STEPS, *, workdir=None, **options):
    options = {"steps_per_loop": 3, **options}
    controller = control(trainer, folder, reporter={"workdir": workdir}, **options)
    controller.restore_checkpoint()
    controller.train(steps)
    reporter = controller.reporter
    return reporter.events, [line for line in reporter.lines if not line.startswith("train ")]


class TwiceBad(reference_model.ReferenceTrainer):
    """The batches of two steps are NaN."""

    weighted = False

    def preprocess(self, batch):
        batch = super().preprocess(batch)
        rows = ctl.replica.current()
        bad = [] if rows is None else [tf.equal(rows.step, step) for step in (3, 6)]
        x = batch["x"]
        return {**batch, "x": tf.where(tf.reduce_any(bad), x * np.nan, x) if bad else x}


@share
def twice_bad():
    return make_reference(cls=TwiceBad, on_non_finite="rollback", optimizer=adam)


@functools.cache
def skipping_states():
    """Step -> the state there of a run that never computes the bad steps."""
    trainer, states = twice_bad(), {}
    for step in range(STEPS):
        if step in (3, 6):
            trainer.global_step.assign_add(1)
        else:
            trainer.train(tf.constant(1))
        states[step + 1] = state(trainer)
    return states


def test_each_of_several_batches_has_its_own_rollback(tmp_path):
    trainer = twice_bad()
    events, lines = run(tmp_path, trainer, checkpoint_interval=5)
    assert [(name, step, fields.get("left_out")) for name, step, fields in events] == [
        ("checkpoint", 0, None), ("non_finite", 3, None), ("rollback", 0, 3),
        ("checkpoint", 5, None), ("non_finite", 6, None), ("rollback", 5, 6),
        ("checkpoint", STEPS, None),
    ]  # fmt: skip
    assert lines[0].startswith("Step 3 is not finite: the loss is first, on the examples ")
    assert lines[0].endswith("Back to step 0; that batch is skipped from now on (rollback 1).")
    assert trainer.global_step.numpy() == STEPS
    assert trainer.optimizer.iterations.numpy() == STEPS - 2
    same(state(trainer), skipping_states()[STEPS])


def test_metrics_and_states_of_actions_after_the_restored_checkpoint_are_repeated(tmp_path):
    trainer = twice_bad()
    log, action = JsonLinesWriter(tmp_path), StopAfter(99, at="eval")
    controller = control(
        trainer, tmp_path / "checkpoints", reporter={"metrics": MetricLog([log])}, actions=[action],
        evaluator=make_evaluator(trainer), checkpoint_interval=4, steps_per_loop=2,
    )  # fmt: skip
    controller.train_and_evaluate(STEPS, eval_interval=2)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    for split, steps in (("train", [2, 3, 6, 8]), ("eval", [2, 4, 6, 8])):
        assert [line["step"] for line in lines if line["split"] == split] == steps
    # Its state in the checkpoint of step 4 is that from before the evaluation of step 4.
    assert action.calls == 4


def test_limit_of_rollbacks_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "ROLLBACK_LIMIT", 1)
    with pytest.raises(Failure, match=r"Step 6 .*rolled back 1 times"):
        run(tmp_path, twice_bad())


def test_decision_outlives_the_process(tmp_path):
    """Killed after the rollback and before the next checkpoint: the batch is skipped again."""
    workdir = Workdir(tmp_path / "run")
    workdir.create({"trainer": "a"})

    class Killed(Exception):
        pass

    def kill(outputs):
        if workdir.rollbacks():
            raise Killed

    actions = [ctl.as_action(kill, at="train")]
    with pytest.raises(Killed):
        run(workdir.checkpoints, twice_bad(), workdir=workdir, actions=actions)
    assert workdir.rollbacks() == [{"step": 3, "tensor": "the loss"}]
    trainer = twice_bad()
    events, _ = run(workdir.checkpoints, trainer, steps=5, workdir=workdir)
    assert [(name, step) for name, step, _ in events] == [("checkpoint", 5)]
    same(state(trainer), skipping_states()[5])


@pytest.mark.parametrize("is_chief", [True, False])
def test_every_process_has_the_rollbacks_of_the_chief(tmp_path, is_chief):
    decisions = [{"step": 13, "tensor": "the loss"}, {"step": 31}]
    workdir = Workdir(tmp_path)
    workdir.create({"trainer": "a"})
    if is_chief:
        workdir.write_rollbacks(decisions)

    class Processes:
        def broadcast_json_from_chief(self, value):
            assert value == (decisions if is_chief else [])
            return decisions

    processes = Processes()
    processes.is_chief = is_chief
    controller = control(make_trainer(1), reporter={"workdir": workdir}, processes=processes)
    assert controller._skipped == [13, 31]


def test_rollback_without_checkpoints_is_rejected():
    with pytest.raises(ctl.UsageError, match="requires `checkpoints` to go back to"):
        Controller(trainer=twice_bad())


def test_rollback_with_the_users_own_dataset_is_rejected():
    with pytest.raises(ctl.UsageError, match="reads batches again"):
        twice_bad().train_dataset = tf.data.Dataset.range(3)


def test_loss_spike_is_rolled_back_and_its_window_is_restored(tmp_path, small_window):
    trainer = jumping(1, 16, on_non_finite="rollback", loss_spike=5.0)
    events, lines = run(tmp_path, trainer, steps=20, checkpoint_interval=14)
    assert [(name, step) for name, step, _ in events] == [
        ("checkpoint", 0), ("checkpoint", 14), ("non_finite", 16), ("rollback", 14),
        ("checkpoint", 20),
    ]  # fmt: skip
    assert "Step 16 has a spike of the loss" in lines[0]
    # Every loss but that one, once.
    assert int(loop_of(trainer).step.update.loss_spikes._count) == 19
