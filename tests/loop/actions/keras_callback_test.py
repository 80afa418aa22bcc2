"""ctl.KerasCallback calls callbacks of Keras in a run, and refuses those that change what is trained."""

import csv

import keras
import numpy as np
import pytest
import tf_keras

import ctl
from ctl.configs import loading, overrides
from tests.support import experiments

callbacks = tf_keras.callbacks
KEYS = {"train.steps_per_loop": 5, "eval.interval": 10, "train.checkpoint_interval": 5}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a run of the tiny experiment with callbacks, in the current folder."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def build(*instances, steps, keys=()):
        config = loading.load_config("experiment.py")
        for name, value in {**KEYS, "train.steps": steps, **dict(keys)}.items():
            overrides.change(config, name, str(value))
        actions = [ctl.KerasCallback(callback) for callback in instances]
        return ctl.Run(config, "run", actions=actions, print_lines=False)

    return build


class Recorder(keras.callbacks.Callback):  # of Keras 3
    def __init__(self):
        super().__init__()
        self.calls, self.logs, self.rates = [], [], []

    def on_train_begin(self, logs=None):
        self.calls.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(batch)
        assert logs["loss"] > 0

    def on_test_end(self, logs=None):
        self.calls.append("test")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"end {epoch}")
        self.logs.append(logs)
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    def on_train_end(self, logs=None):
        self.calls.append("end")


@pytest.mark.slow
def test_loops_are_batches_and_evaluations_end_epochs_also_in_a_resumed_run(make):
    first, second = Recorder(), Recorder()
    with make(first, callbacks.CSVLogger("log.csv"), steps=20) as run:
        run.evaluate()  # without training
        run.train()
        history = run.history
    epochs = [[f"epoch {i}", 10 * i + 4, 10 * i + 9, "test", f"end {i}"] for i in range(3)]
    assert first.calls == ["test", "train", *epochs[0], *epochs[1], "end"]
    for logs, row in zip(first.logs, (2, 4), strict=True):
        assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= logs.keys()
        assert logs["loss"] == history["loss"][row]
        assert logs["val_loss"] == history["eval/loss"][row]
    assert first.rates == [run.learning_rate] * 2
    with open("log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[1]["val_loss"]) == pytest.approx(first.logs[1]["val_loss"])

    with make(second, steps=30) as run:
        run.train()
    # It begins with the evaluation of its checkpoint, which was saved before.
    assert second.calls == ["train", "epoch 1", "test", "end 1", *epochs[2], "end"]


def test_stop_training_ends_the_run(make):
    stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=1)
    with make(stopping, steps=40) as run:
        run.train()
        assert run.step == 20 and run.stop_reason == "EarlyStopping has set model.stop_training"


def test_run_without_an_evaluation_ends_an_epoch_after_each_loop(make):
    recorder = Recorder()
    keys = {"eval.splits": "[]", "eval.interval": 0}
    with make(recorder, steps=10, keys=keys) as run:
        run.train()
    assert recorder.calls == ["train", "epoch 0", 4, "end 0", "epoch 1", 9, "end 1", "end"]


class Perturb(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([1.5 * value for value in self.model.get_weights()])


def lower_rate(batch, logs):
    run.model.optimizer.learning_rate.assign(0.25)


run = callbacks.LambdaCallback(on_batch_end=lower_rate)


@pytest.mark.parametrize(
    ("callback", "hook", "saved"), [(Perturb(), "epoch", 10), (run, "batch", None)]
)
def test_callback_that_changes_weights_or_the_rate_is_refused(make, callback, hook, saved):
    with make(callback, steps=20) as run:
        message = rf"\w+\.on_(train_)?{hook}_end changes weights or the learning rate, .*"
        with pytest.raises(ctl.UsageError, match=message):
            run.train()
        assert run._run.checkpoints.latest_step() == saved  # before the change


@pytest.mark.parametrize(
    ("callback", "fix"),
    [
        (callbacks.ReduceLROnPlateau(), "optimizer.schedule"),
        (keras.callbacks.LearningRateScheduler(lambda epoch: 0.1), "optimizer.schedule"),
        (callbacks.EarlyStopping(restore_best_weights=True), "train.best.restore"),
        (callbacks.EarlyStopping, "requires an instance"),
        (print, "requires an instance"),
    ],
)
def test_what_cannot_work_is_refused_at_once(callback, fix):
    with pytest.raises(ctl.UsageError, match=fix) as raised:
        ctl.KerasCallback(callback)
    assert "\n" not in str(raised.value)
