"""An inner loop is measured and checked, and its outputs are numbers."""

import orbit
import pytest
import tensorflow as tf

import ctl
from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.loop.loop_monitor import LoopMonitor, StepSummaries
from ctl.loop.metric_log import MetricLog
from ctl.loop.timing import Every
from ctl.update.non_finite import NonFiniteReport
from tests.loop.shared import Recording, control, make_reference, read_summaries, share
from tests.support import reference_model


@share
def make_trainer(**options):
    return make_reference(**options)


class Monitored:
    """A trainer and its monitor, which records the events."""

    def __init__(self, **options):
        self.trainer = trainer = make_trainer(**options)
        self.reporter = Recording(trainer)
        self.monitor = LoopMonitor(
            trainer,
            self.reporter,
            summaries=orbit.utils.SummaryManager(None, tf.summary.scalar, trainer.global_step),
            step_summaries=StepSummaries(trainer, every=Every(10), print_line=print),
        )

    def run(self, steps):
        boundary = int(self.trainer.global_step.numpy()) + steps
        with self.monitor.measure(steps):
            outputs = self.monitor.read(self.trainer.train(tf.constant(steps)))
        self.monitor.check(boundary, steps=steps, outputs=outputs)
        return outputs


def test_steps_that_the_trainer_reports_are_recorded(monkeypatch):
    made = Monitored()
    monkeypatch.setattr(made.trainer, "non_finite_report", NonFiniteReport(1, "the loss", 1))
    made.monitor.check(0, steps=2, outputs={})
    assert made.reporter.steps() == [("non_finite", 1)]


def test_step_that_is_not_finite_is_left_to_the_caller(monkeypatch):
    def fail(steps):
        raise NonFiniteStep(NonFiniteReport(1, "the loss", 1), None)

    made = Monitored()
    monkeypatch.setattr(made.trainer, "train", fail)
    with pytest.raises(NonFiniteStep):
        made.run(2)
    assert made.reporter.steps() == [] and made.reporter.throughput.last_seconds == 0


def test_loop_must_count_its_steps_and_may_repeat_some_only_with_a_coordinator(
    monkeypatch, pretend_strategy
):
    made = Monitored()

    def train(steps):
        made.trainer.global_step.assign_add(5)

    monkeypatch.setattr(made.trainer, "train", train)
    assert made.run(5) == {}  # a trainer may return nothing
    for steps in (3, 6):
        with pytest.raises(UsageError, match=r"A loop to step \d+ ended at step \d+: train_step"):
            made.run(steps)
    pretend_strategy("parameter_server")
    made.run(3)
    assert made.reporter.steps() == [("repeated", 20)]
    with pytest.raises(UsageError, match="A loop to step 26 ended at step 25"):
        made.run(6)


def test_loss_that_is_not_finite_ends_the_run_and_is_recorded():
    made = Monitored()
    with pytest.raises(Failure, match="The loss of the loop that ended at step 0 is inf"):
        made.monitor.check(0, steps=2, outputs={"loss": float("inf")})
    assert made.reporter.steps() == [("non_finite", 0)]


@pytest.mark.parametrize(("policy", "loss"), [("stop", "a"), ("ignore", float("nan"))])
def test_other_outputs_are_accepted(policy, loss):
    made = Monitored(on_non_finite=policy)
    made.monitor.check(0, steps=2, outputs={"loss": loss})
    assert made.reporter.steps() == []


class Summarizing(reference_model.ReferenceTrainer):
    """Writes the replica's number of rows in each step, and a value in a hook."""

    def replica_step(self, batch):
        tf.summary.scalar("rows", tf.shape(batch["x"])[0])
        return super().replica_step(batch)

    def train_loop_end(self):
        tf.summary.scalar("hook", 1.0)
        return super().train_loop_end()


class Summary(ctl.Action):
    def __init__(self, at):
        self.at = at

    def __call__(self, outputs):
        tf.summary.scalar("action", outputs["loss"])


def read(folder):
    """The summaries in a folder: name -> {step: value}."""
    return read_summaries(folder, lambda value: float(tf.make_ndarray(value.tensor)))


def run(folder, *, replicas=1, interval=0, **options):
    trainer = make_reference(replicas, 7, cls=Summarizing, **options)
    reporter = {"metrics": MetricLog(summary_folder=folder), "summary_interval": interval}
    actions = [Summary("train"), Summary("eval")]
    options = dict(evaluator=ctl.StandardEvaluator(trainer), steps_per_loop=4, actions=actions)
    controller = control(trainer, reporter=reporter, **options)
    controller.train_and_evaluate(12, eval_interval=6)
    lines = controller.reporter.lines
    return controller, [line for line in lines if not line.startswith(("train ", "eval "))]


def test_summaries_by_time_are_those_of_the_first_step_of_a_loop(tmp_path, monkeypatch):
    trainer = make_reference(cls=Summarizing)
    now = {0: 0.0, 4: 59.0, 8: 60.0, 12: 61.0}
    monkeypatch.setattr("time.monotonic", lambda: now[int(trainer.global_step)])
    summaries = StepSummaries(trainer, every=Every(seconds=60.0), print_line=print)
    with tf.summary.create_file_writer(str(tmp_path)).as_default(trainer.global_step):
        for _ in range(4):
            with summaries.recording():
                trainer.train(tf.constant(4))
    # The first step of the run is always written.
    assert list(read(tmp_path)["rows"]) == [0, 8]


def test_step_hook_and_action_write_at_multiples_of_the_interval(tmp_path):
    controller, lines = run(tmp_path, replicas=2, interval=3)
    summaries = read(tmp_path / "train")
    # The step counts the consumed batches: the first one is step 0. Loops end at 4, 6, 8 and 12.
    assert summaries["rows"] == {0: 4, 3: 4, 6: 4, 9: 4}
    assert list(summaries["hook"]) == list(summaries["action"]) == [4, 6, 8, 12]
    assert summaries["action"][12] == pytest.approx(controller.outputs["loss"])
    assert list(read(tmp_path / "eval")["action"]) == [6, 12]
    assert lines == []


@pytest.mark.slow
def test_compiled_step_trains_and_one_line_says_what_is_not_written(tmp_path):
    controller, lines = run(tmp_path, xla="step", precision="float32")
    assert controller.step == 12
    summaries = read(tmp_path / "train")
    assert "rows" not in summaries and list(summaries["hook"]) == [4, 6, 8, 12]
    (line,) = lines
    assert "not written: runtime.xla=step compiles it: choose runtime.xla=off, or call" in line
