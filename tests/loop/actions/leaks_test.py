"""Functions that are traced again, and growth of memory, are reported."""

import pytest
import tensorflow as tf

import ctl
from ctl.loop.actions import leaks
from ctl.loop.actions.leaks import MemoryGrowth, Retraces, read_resident_bytes
from tests.loop.shared import control, make_reference
from tests.support import reference_model


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
    return make_reference(batch=7, cls=cls)


def test_function_with_a_python_number_is_reported_once_with_the_argument(train):
    trainer = make_trainer()
    trainer.python_number = True
    reporter = train(trainer)
    (line,) = reporter.lines
    assert line.startswith("trainer.scaled was traced again before step 6, 3 times so far (")
    assert "(factor was 4, and is 6)" in line and "no Python numbers" in line
    (event,) = reporter.events
    assert (event["event"], event["step"], event["function"]) == ("retrace", 6, "trainer.scaled")


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
def test_traces_of_the_first_loops_and_evaluations_and_calls_with_tensors_are_not_reported():
    trainer = make_trainer()
    evaluator = ctl.StandardEvaluator(trainer)
    controller = control(trainer, evaluator=evaluator, steps_per_loop=2, actions=[Retraces()])
    controller.train_and_evaluate(10, eval_interval=4)
    assert [name for name, *_ in controller.reporter.events] == ["eval"] * 3


MIB = 2**20


@pytest.fixture
def report(fake_controller, monkeypatch):
    """Returns the lines printed for measurements in MiB, one per loop of 10 steps."""

    def run(samples):
        values, action = iter(samples), MemoryGrowth()
        monkeypatch.setattr(leaks, "read_resident_bytes", lambda: next(values) * MIB)
        action.controller = fake_controller
        for loop in range(1, len(samples) + 10):
            fake_controller.step = 10 * loop
            action({"loss": 0.0})
        assert len(action._samples) <= 256
        return fake_controller.reporter.lines

    return run


def test_growth_without_an_end_is_reported_with_its_rate(report, fake_controller):
    lines = report([1000 + 10 * i for i in range(110)])
    # The tenth loop ends at step 100; 260 MiB are reached 26 loops later.
    assert "1,000 MiB at step 100, 1,260 MiB now, 1,000 MiB per 1,000 steps" in lines[0]
    now = [line.partition(" MiB now")[0][-5:] for line in lines]
    assert now == ["1,260", "1,520", "2,040"]
    assert fake_controller.reporter.events[0] == {
        "event": "memory_growth", "step": 360, "before": 1000 * MIB, "after": 1260 * MIB,
    }  # fmt: skip


@pytest.mark.parametrize(
    "samples",
    [
        [1000] * 50,
        [1000 + 2 * i for i in range(100)],  # less than 256 MiB
        [5000 + 10 * i for i in range(100)],  # less than a quarter
        [1000] * 25 + [1600] * 25,  # one increase, as by the first evaluation
        [1000, 1600] * 25,  # up and down
        [0] * 5000,  # not known; a long run keeps few measurements
    ],
)
def test_other_changes_are_not_reported(report, samples):
    assert report(samples) == []


def test_resident_memory_of_this_process_is_read():
    before = read_resident_bytes()
    block = bytearray(64 * MIB)
    assert 32 * MIB < read_resident_bytes() - before < 128 * MIB and block
