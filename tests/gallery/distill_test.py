"""The distillation of experiments/distill.py, with few images."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from experiments.trainers import distill
from tests.gallery import curves


def make(replicas):
    """A trainer whose first layer is frozen until step 7."""
    return curves.build(
        curves.small(distill.DistillTrainer, label=curves.LABELS),
        replicas,
        tf_keras.optimizers.Adam(1e-3),
        optimizer_groups=[dict(variables="conv2d/*", frozen_until=7, learning_rate_scale=0.1)],
        model=dict(dropout=0.0, temperature=4.0, teacher_weight=1.0),
    )


@pytest.mark.slow
def test_the_curve_is_that_of_one_device_and_the_first_layer_is_trained_from_its_step_on():
    trainer = make(1)
    teacher, stem = trainer.teacher.get_weights(), trainer.model.get_layer("conv2d")
    before, head = stem.get_weights(), trainer.model.get_layer("head").get_weights()
    one = curves.train(trainer)
    # Adam's first gradient in its eighth update, with a tenth of the rate.
    move = 1e-4 * 0.1 / (1 - 0.9**8) / np.sqrt(0.001 / (1 - 0.999**8))
    assert np.abs(stem.get_weights()[0] - before[0]).max() == pytest.approx(move, rel=1e-3)
    assert np.abs(trainer.model.get_layer("head").get_weights()[0] - head[0]).max() > 1e-3
    for weight, old in zip(trainer.teacher.get_weights(), teacher, strict=True):
        np.testing.assert_array_equal(weight, old)
    losses = curves.assert_same(one, curves.train(make(2)))
    assert losses[-1] < losses[0]


def test_loss_is_the_cross_entropy_and_the_divergence_from_the_teacher():
    trainer = make(1)
    trainer.teacher = lambda images, training: np.log([[4.0] + [1.0] * 9]) * 4  # temperature 4
    batch = {"image": np.zeros((1, 28, 28)), "label": [0]}
    (loss,) = trainer.per_example_loss(batch, tf.zeros([1, 10], tf.float64))
    p = np.array([4.0] + [1.0] * 9) / 13
    assert float(loss) == pytest.approx(np.log(10) + 16 * np.sum(p * np.log(p * 10)), rel=1e-6)


@pytest.mark.slow
def test_the_experiment_starts_from_the_run_of_the_teacher(tmp_path, capsys):
    tf_keras.backend.reset_uids()
    teacher = tmp_path / "teacher"
    curves.run_experiment("mnist", teacher, {"train.steps": 2, "eval.splits": []})
    keys = {
        "train.steps": 6, "train.steps_per_loop": 4, "eval.splits": [], "init.checkpoint": teacher,
        "init.models.teacher": teacher,
        "optimizer.groups": [{"variables": "conv2d/*", "frozen_until": 3}],
    }  # fmt: skip
    tf_keras.backend.reset_uids()
    assert curves.run_experiment("distill", tmp_path / "student", keys)["step"] == 6
    lines = capsys.readouterr().out.splitlines()
    for text in ("Weights of 2 of 6 variables from", "Weights of 8 of 8 variables of teacher from"):
        assert any(line.startswith(text) for line in lines), text
