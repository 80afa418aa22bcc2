"""Boundaries at absolute steps, and what a resumed run does."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import evaluator, testing
from ctl.errors import Failure
from ctl.loop import controller as controller_module
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from tests import reference_model
from tests.fake_nvml import FakeGpu, FakeNvml


class Dropping(reference_model.ReferenceTrainer):
    dropout = 0.4


def adam():
    schedule = tf_keras.optimizers.schedules.CosineDecay(1e-2, 40)
    return tf_keras.optimizers.Adam(schedule)


@pytest.fixture
def make(tmp_path):
    """Makes a controller over the folder, as a new process would; its events are in `.events`."""

    def build(replicas=1, *, batch=7, stop_at=None, **options):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas), batch, cls=Dropping, optimizer=adam
        )
        events = []
        controller = Controller(
            trainer=trainer,
            evaluator=ctl.StandardEvaluator(trainer),
            checkpoints=Checkpointer(tmp_path / "checkpoints", trainer, keep=20),
            on_event=lambda name, step, **_: events.append((name, step)),
            stop=lambda: stop_at is not None and trainer.global_step.numpy() >= stop_at,
            **{"steps_per_loop": 5, **options},
        )
        controller.events = events
        return controller

    return build


def variables(controller):
    trainer = controller.trainer
    found = (*trainer.model.variables, *trainer.optimizer.variables, trainer.global_step)
    return [v.numpy() for v in found]


def test_checkpoints_and_evaluations_fall_on_multiples_of_their_intervals(make):
    controller = make(steps_per_loop=5, checkpoint_interval=4)
    controller.train_and_evaluate(14, eval_interval=6)
    assert [step for name, step in controller.events if name == "checkpoint"] == [4, 8, 12, 14]
    assert [step for name, step in controller.events if name == "eval"] == [6, 12, 14]


def test_resumed_run_keeps_the_boundaries(make):
    make(checkpoint_interval=4, stop_at=7, steps_per_loop=7).train_and_evaluate(14)
    controller = make(checkpoint_interval=4, steps_per_loop=7)
    assert controller.restore_checkpoint().endswith("ckpt-7")
    controller.train_and_evaluate(14, eval_interval=6)
    assert controller.events == [
        ("checkpoint", 8),
        ("checkpoint", 12),
        ("eval", 12),
        ("checkpoint", 14),
        ("eval", 14),
    ]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 2)])
def test_interrupted_run_ends_with_the_same_bits(make, first, second):
    whole = make(first)
    whole._saving.checkpoints = None
    whole.train(20)
    make(first, stop_at=8, steps_per_loop=4).train(20)
    resumed = make(second, steps_per_loop=3)
    resumed.restore_checkpoint()
    assert resumed.step == 8
    resumed.train(20)
    for one, other in zip(variables(whole), variables(resumed), strict=True):
        assert np.array_equal(one, other)


def test_run_resumed_on_other_replicas_goes_on_with_the_same_batches(make):
    whole = make(1)
    whole._saving.checkpoints = None
    whole.train(20)
    make(1, stop_at=5).train(20)
    four = make(4, stop_at=10)
    four.restore_checkpoint()
    four.train(20)
    two = make(2)
    two.restore_checkpoint()
    assert two.step == 10
    two.train(20)
    for one, other in zip(variables(whole), variables(two), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_stopping_saves_where_it_stopped_and_does_not_evaluate(make):
    controller = make(stop_at=5, checkpoint_interval=100)
    assert controller.train_and_evaluate(20) is None
    assert controller.stopped
    assert controller.events == [("checkpoint", 5)]


def test_a_step_is_saved_once(make):
    controller = make(checkpoint_interval=5)
    controller.train(10)
    controller.save_checkpoint()
    assert controller.events == [("checkpoint", 5), ("checkpoint", 10)]


def test_checkpoint_of_another_model_is_refused_in_one_line(make, tmp_path):
    make().train(5)

    class Wider(reference_model.ReferenceTrainer):
        def build_model(self):
            inputs = tf_keras.Input([reference_model.FEATURES], name="x")
            return tf_keras.Model(inputs, tf_keras.layers.Dense(reference_model.CLASSES)(inputs))

        def forward(self, batch, training):
            return self.model(batch["x"], training=training)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 7, cls=Wider, optimizer=adam)
    with pytest.raises(ctl.UsageError, match="does not fit this trainer") as error:
        Checkpointer(tmp_path / "checkpoints", trainer).restore_latest()
    assert "\n" not in str(error.value)


def test_speed_is_that_of_training_after_the_first_loop(make):
    controller = make()
    controller.train(5)
    assert controller.examples_per_second is None
    controller.train(10)
    assert controller.examples_per_second > 0


def test_summaries_and_lines_are_written(make, tmp_path):
    lines = []
    controller = make(
        summary_dir=str(tmp_path / "train"),
        eval_summary_dir=str(tmp_path / "eval"),
        progress=Progress(total=10, every=0.0, write=lines.append),
    )
    controller.train_and_evaluate(10)
    assert [line.split("|")[0].strip() for line in lines] == [
        "train       5/10",
        "train      10/10",
        "eval       10/10",
    ]
    tags = {
        value.tag
        for split in ("train", "eval")
        for path in (tmp_path / split).glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert {"loss", "accuracy", "examples", "examples_per_second"} <= tags


def test_step_that_does_not_count_itself_is_refused(make):
    class Uncounted(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            next(iterator)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 7, cls=Uncounted)
    with pytest.raises(ctl.UsageError, match="add 1 to"):
        Controller(trainer=trainer, steps_per_loop=5).train(10)


def test_a_wish_to_stop_is_seen_inside_an_evaluation(make, monkeypatch):
    monkeypatch.setattr(evaluator, "STEPS_BETWEEN_LOOKS", 2)
    controller = make()
    asked = []

    def stop():
        asked.append(controller.step)
        return len(asked) > 2  # after two loops, at the first look of the evaluation

    controller._stop = stop
    assert controller.train_and_evaluate(20, eval_interval=10) is None
    assert controller.stopped and controller.step == 10
    assert asked == [5, 10, 10]
    assert controller.events == [("checkpoint", 10)]
    again = make()
    again.restore_checkpoint()
    again._stop = lambda: False
    assert again.train_and_evaluate(20, eval_interval=10)["examples"] == reference_model.EXAMPLES


def test_checkpoints_fall_due_by_time_too(make):
    asked = []

    def due(seconds):
        asked.append(seconds >= 0)
        return len(asked) == 2

    controller = make(save_due=due)
    controller.train(20)
    assert [step for name, step in controller.events if name == "checkpoint"] == [10, 20]
    assert asked == [True] * 4


def test_a_loss_that_no_look_at_gradients_saw_ends_the_run(tmp_path):
    class Own(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return tf.constant(float("nan"), tf.float64)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 7, cls=Own)
    controller = Controller(trainer=trainer, checkpoints=Checkpointer(tmp_path, trainer))
    with pytest.raises(Failure, match=r"loop that ended at step 5 is nan. Nothing was saved"):
        controller.train(5)
    assert controller.checkpoints.latest_step() is None
    lenient = reference_model.make_trainer(
        testing.make_strategy(1), 7, cls=Own, on_non_finite="ignore"
    )
    Controller(trainer=lenient).train(5)


def test_a_weight_that_is_not_finite_is_not_saved(make, tmp_path):
    controller = make()
    controller.train(5)
    weight = controller.trainer.model.trainable_variables[1]
    weight.assign(weight / 0.0)
    with pytest.raises(Failure, match="is not finite after step 5, which is not saved"):
        controller._saving.saved_step = None
        controller.save_checkpoint()


def summary_tags(folder):
    return {
        value.tag
        for path in folder.glob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


def test_gpu_usage_is_printed_and_summarized_next_to_the_outputs(tmp_path):
    lines = []
    controller = Controller(
        trainer=reference_model.make_trainer(testing.make_strategy(1), 7),
        steps_per_loop=5,
        summary_dir=str(tmp_path),
        progress=Progress(total=5, write=lines.append),
        gpu_usage=lambda: {"gpu_memory_gib": 5.0, "gpu_utilization": 0.9},
    )
    controller.train(5)
    assert "| gpu_memory_gib 5.0000 | gpu_utilization 0.9000" in lines[0]
    assert {"loss", "gpu_memory_gib", "gpu_utilization"} <= summary_tags(tmp_path)
    assert set(controller.outputs) == {"loss", "accuracy"}


def test_usage_is_printed_only_if_a_replica_is_on_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu()]))
    lines = []
    Controller(
        trainer=reference_model.make_trainer(testing.make_strategy(1), 7),
        steps_per_loop=5,
        progress=Progress(total=5, write=lines.append),
    ).train(5)
    assert [("gpu" in line) for line in lines] == [bool(tf.config.list_physical_devices("GPU"))]


@pytest.mark.parametrize(
    ("devices", "on_gpu"),
    [
        (("/job:localhost/replica:0/task:0/device:GPU:0",), True),
        (("/job:localhost/replica:0/task:0/device:CPU:0",), False),
        (("/job:worker/replica:0/task:0/device:TPU:0",), False),
    ],
)
def test_replicas_on_gpus_are_detected_by_their_devices(devices, on_gpu):
    extended = types.SimpleNamespace(worker_devices=devices)
    assert controller_module._on_gpu(types.SimpleNamespace(extended=extended)) == on_gpu
