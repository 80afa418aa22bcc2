"""Functions that are traced again."""

import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.loop.actions.retraces import Retraces
from ctl.loop.controller import Controller
from ctl.loop.reporter import Reporter
from tests import reference_model


class Calling(reference_model.ReferenceTrainer):
    """Calls a function of its own after each loop: with a Python number, or as it should."""

    python_number = False

    @tf.function
    def scaled(self, value, factor):
        return value * tf.cast(factor, tf.float32)

    def train_loop_end(self):
        step = int(self.global_step.numpy())
        self.scaled(tf.ones(3), step if self.python_number else tf.constant(step))
        return super().train_loop_end()


@pytest.fixture
def train(fake_controller):
    """Runs 8 loops of 2 steps of a trainer with the action, and returns what it reports."""

    def run(trainer, before_loop=lambda loop: None):
        action = Retraces()
        action.begin(fake_controller)
        fake_controller.trainer = trainer
        for loop in range(8):
            before_loop(loop)
            trainer.train(tf.constant(2))
            fake_controller.step = int(trainer.global_step.numpy())
            action({"loss": 0.0})
        return fake_controller.reporter

    return run


def make_trainer(cls=Calling):
    return reference_model.make_trainer(testing.make_strategy(1), 7, cls=cls)


def test_function_with_a_python_number_is_reported_once_with_the_argument(train):
    trainer = make_trainer()
    trainer.python_number = True
    reporter = train(trainer)
    assert reporter.lines == [
        "trainer.scaled was traced again before step 6, 3 times so far (factor was 4, and is 6): each "
        "trace takes time and memory; pass tensors of constant shape and dtype, and no Python numbers."
    ]
    assert [(e["event"], e["step"], e["function"]) for e in reporter.events] == [
        ("retrace", 6, "trainer.scaled")
    ]


@pytest.mark.slow
def test_function_that_is_called_as_it_should_be_is_not_reported(train):
    assert train(make_trainer()).lines == []


def test_data_of_another_dtype_is_named(train):
    trainer = make_trainer(reference_model.ReferenceTrainer)

    def change(loop):
        if loop in (0, 5):
            rows = reference_model.examples(7)
            rows["label"] = rows["label"].astype("int32" if loop else "int64")
            dataset = tf.data.Dataset.from_tensors(rows).repeat()
            trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(dataset)

    (line,) = train(trainer, change).lines
    assert line.startswith("the training loop was traced again before step 12, 2 times so far (")
    assert "iterator['label'] was int64 (7,), and is int32 (7,)" in line


@pytest.mark.slow
def test_traces_of_the_first_loops_and_evaluations_are_not_reported():
    trainer, events = make_trainer(), []
    controller = Controller(
        trainer=trainer,
        evaluator=ctl.StandardEvaluator(trainer),
        reporter=Reporter(trainer, on_event=lambda name, step, **_: events.append(name)),
        steps_per_loop=2,
        actions=[Retraces()],
    )
    controller.train_and_evaluate(10, eval_interval=4)
    assert events == ["eval", "eval", "eval"]
