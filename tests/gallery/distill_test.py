"""The distillation of experiments/distill.py, with few images."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from experiments.trainers import distill
from tests import child, one_batch
from tests.experiments import read_result

draw = np.random.default_rng(0)
IMAGES, LABELS = draw.integers(256, size=(16, 28, 28)).astype(np.uint8), np.arange(16) % 10
GROUPS = [dict(variables="conv2d/*", frozen_until=7, learning_rate_scale=0.1)]


class Small(distill.DistillTrainer):
    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES, "label": LABELS})


def make(replicas, precision="float64"):
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(1)
    return Small(
        strategy=one_batch.strategy(replicas),
        global_batch_size=7,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        options=ctl.TrainerOptions(
            precision=precision,
            optimizer_groups=GROUPS,
            model=dict(dropout=0.0, temperature=4.0, teacher_weight=1.0),
        ),
    )


def copies(trainer):
    """Each replica's copies of all variables."""
    variables = [*trainer.model.variables, *trainer.optimizer.variables, *trainer.teacher.variables]
    return [testing.copies(trainer.strategy, variable) for variable in variables]


@functools.cache
def train(replicas):
    """Each replica's copies after 20 steps, and the losses; layers are unfrozen within a loop."""
    trainer = make(replicas)
    losses = [float(trainer.train(tf.constant(5))["loss"]) for _ in range(4)]
    return copies(trainer), losses


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    expected, expected_losses = train(1)
    actual, losses = train(2)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    assert losses[-1] < losses[0]
    for (value,), each in zip(expected, actual, strict=True):
        assert len(each) == 2
        for copy in each:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_the_teacher_never_changes_and_the_first_layer_is_trained_from_its_step_on():
    trainer = make(1)
    teacher, stem = trainer.teacher.get_weights(), trainer.model.get_layer("conv2d")
    before, head = stem.get_weights(), trainer.model.get_layer("head").get_weights()
    trainer.train(tf.constant(7))
    np.testing.assert_array_equal(stem.get_weights()[0], before[0])
    trainer.train(tf.constant(1))
    # Adam's first gradient in its eighth update, with a tenth of the rate.
    move = 1e-4 * 0.1 / (1 - 0.9**8) / np.sqrt(0.001 / (1 - 0.999**8))
    assert np.abs(stem.get_weights()[0] - before[0]).max() == pytest.approx(move, rel=1e-3)
    assert np.abs(trainer.model.get_layer("head").get_weights()[0] - head[0]).max() > 1e-3
    for weight, old in zip(trainer.teacher.get_weights(), teacher, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.slow
def test_run_that_is_resumed_has_the_same_bits(tmp_path):
    uninterrupted, paths = make(1, "float32"), {}
    for steps, stop in ((4, 4), (5, 9)):  # before and after the layer is unfrozen
        uninterrupted.train(tf.constant(steps))
        checkpoint = tf.train.Checkpoint(**uninterrupted.checkpoint_items())
        paths[stop] = checkpoint.save(str(tmp_path / f"{stop}/ckpt"))
    uninterrupted.train(tf.constant(3))
    resumed = make(1, "float32")
    checkpoint = tf.train.Checkpoint(**resumed.checkpoint_items())
    for stop in (9, 4):  # from 9 in a new trainer
        checkpoint.restore(paths[stop]).assert_consumed()
        resumed.train(tf.constant(12 - stop))
        for each, others in zip(copies(uninterrupted), copies(resumed), strict=True):
            np.testing.assert_array_equal(each, others)


def test_loss_is_the_cross_entropy_and_the_divergence_from_the_teacher():
    trainer = make(1)
    trainer.teacher = lambda images, training: np.log([[4.0] + [1.0] * 9]) * 4  # temperature 4
    batch = {"image": np.zeros((1, 28, 28)), "label": [0]}
    (loss,) = trainer.per_example_loss(batch, tf.zeros([1, 10], tf.float64))
    p = np.array([4.0] + [1.0] * 9) / 13
    assert float(loss) == pytest.approx(np.log(10) + 16 * np.sum(p * np.log(p * 10)), rel=1e-6)


@pytest.mark.slow
def test_the_experiment_starts_from_the_run_of_the_teacher(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(child.ROOT)
    tf_keras.backend.reset_uids()
    teacher = tmp_path / "teacher"
    flags = ["--config.train.steps=2", "--config.eval.splits=[]"]
    assert main.run(["ctl", "--config=experiments/mnist.py", f"--workdir={teacher}", *flags]) == 0
    flags += [f"--config.init.{key}={teacher}" for key in ("checkpoint", "models.teacher")]
    flags += ["--config.train.steps_per_loop=4"]
    flags[0] = "--config.train.steps=6"
    flags.append("--config.optimizer.groups=[{'variables': 'conv2d/*', 'frozen_until': 3}]")
    tf_keras.backend.reset_uids()
    student = tmp_path / "student"
    assert main.run(["ctl", "--config=experiments/distill.py", f"--workdir={student}", *flags]) == 0
    assert read_result(student)["step"] == 6
    lines = capsys.readouterr().out.splitlines()
    for text in ("Weights of 2 of 6 variables from", "Weights of 8 of 8 variables of teacher from"):
        assert any(line.startswith(text) for line in lines), text
