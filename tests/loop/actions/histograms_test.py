"""Histograms, graph, hparams and config of a run, read back from its event files."""

import dataclasses

import pytest
import tensorflow as tf

import ctl
from ctl.built.inner_loop import loop_of
from ctl.loop.actions.histograms import GraphSummary, WeightHistograms
from ctl.loop.loop_monitor import StepSummaries
from ctl.loop.metric_log import MetricLog
from ctl.loop.timing import Every
from ctl.parts.histograms import find_obstacle
from tests.loop.shared import control, count_operations, make_reference, read_summaries
from tests.support import reference_model

# Operations of the reference model's loop at the commit before the options of this file, and 27 that
# reject negative weights. Since 2.22 the gradient of tanh consists of several operations.
BARE = 326 if tf.__version__ >= "2.22" else 312


def read(folder):
    """Tag -> steps of the summaries in a folder."""
    return {name: list(steps) for name, steps in read_summaries(folder).items()}


class Pictures(ctl.Action):
    """Writes an image and a text, as a user's action may."""

    at = "train"

    def __call__(self, outputs):
        tf.summary.image("picture", tf.zeros([1, 4, 4, 1]))
        tf.summary.text("note", "first")


def run(folder, *, replicas=1, **options):
    trainer = make_reference(replicas, 7, **options)
    reporter = {"metrics": MetricLog(summary_folder=folder / "summaries")}
    actions = [WeightHistograms(5), GraphSummary(), Pictures()]
    controller = control(trainer, reporter=reporter, steps_per_loop=4, actions=actions)
    # A name of a folder that UTF-8 cannot encode.
    config = {"seed": 3, "train": {"steps": 12}, "data": {"dir": "\ud800"}}
    controller.reporter.metrics.begin(config, step=0, is_new=True)
    controller.train(12)
    lines = controller.reporter.lines
    return trainer, [line for line in lines if not line.startswith("train ")]


@pytest.mark.slow
def test_weights_and_gradients_have_histograms_at_multiples_of_the_interval(tmp_path):
    trainer, lines = run(tmp_path, replicas=2, histogram_interval=5)
    steps = read(tmp_path / "summaries/train")
    names = [v.name.removesuffix(":0") for v in trainer.model.trainable_variables]
    # Gradients of the steps 0, 5 and 10; weights at the first ends of loops after 5 and 10.
    for kind, expected in (("gradients", [0, 5, 10]), ("weights", [8, 12])):
        written = {tag: steps[tag] for tag in steps if f"{kind}/" in tag}
        assert written == {f"{kind}/{name}": expected for name in names}
    assert "graph" in steps and lines == []
    assert steps["picture"] == steps["note"] == [4, 8, 12]
    steps = read(tmp_path / "summaries")
    assert "config" in steps and any("hparams" in tag for tag in steps)


class OwnStep(reference_model.ReferenceTrainer):
    """Applies gradients of its own."""

    def replica_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.per_example_loss(batch, self.forward(batch, training=True)))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def test_step_that_cannot_write_them_has_a_line_about_its_gradients(tmp_path, caplog):
    run(tmp_path, histogram_interval=5, precision="float32", cls=OwnStep)
    steps = read(tmp_path / "summaries/train")
    assert any("weights/" in tag for tag in steps)
    assert not any("gradients/" in tag for tag in steps)
    start = "summaries.histogram_interval writes no histograms of the gradients: "
    (line,) = (each for each in caplog.messages if each.startswith(start))
    assert "the trainer's own step does not call minimize" in line


def test_each_strategy_and_xla_mode_that_cannot_write_them_has_a_reason():
    plan = loop_of(make_reference()).plan
    reasons = [
        find_obstacle(dataclasses.replace(plan, strategy=name))
        for name in ("one_device", "tpu", "parameter_server")
    ]
    assert not reasons[0] and "TPU" in reasons[1] and "parameter servers" in reasons[2]
    for xla in ("loop", "step", "gradients", "autocluster"):
        reason = find_obstacle(dataclasses.replace(plan, xla=xla))
        assert (f"runtime.xla={xla} compiles them" in reason) == (xla in ("loop", "step"))


def operations(**options):
    """The number of operations in the graph of a training loop."""
    trainer = make_reference(**options)
    summaries = StepSummaries(trainer, every=Every(4), print_line=print)
    with tf.summary.create_noop_writer().as_default(), summaries.recording():
        trainer.train(tf.constant(1))
    return sum(count_operations(trainer).values())


@pytest.mark.slow
def test_bare_step_has_no_more_operations_than_before_anything_could_be_measured():
    assert operations() <= BARE < operations(norms="global")
