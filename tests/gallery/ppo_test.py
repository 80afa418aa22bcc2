"""The reinforcement learning of experiments/ppo.py, with a small model and few episodes."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from experiments.trainers import ppo
from tests import child, one_batch
from tests.experiments import read_result


@functools.cache
def train(replicas):
    """Each replica's copies of the variables after 20 steps, the losses and the lengths of episodes."""
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(1)
    trainer = ppo.PpoTrainer(
        strategy=one_batch.strategy(replicas),
        global_batch_size=5,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        options=ctl.TrainerOptions(precision="float64", model=dict(width=4, updates=2, limit=50)),
    )
    outputs = [trainer.train(tf.constant(5)) for _ in range(4)]
    copies = [testing.copies(trainer.strategy, v) for v in trainer.model.trainable_variables]
    return copies, [float(o["loss"]) for o in outputs], [float(o["steps"]) for o in outputs]


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    expected, expected_losses, expected_steps = train(1)
    actual, losses, steps = train(2)
    assert steps == expected_steps and 10 < steps[0] < 50
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    for (value,), copies in zip(expected, actual, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def test_dynamics_are_those_of_gymnasium():
    state = tf.constant([[0.1, -0.2, 0.05, 0.3], [0.1, -0.2, 0.05, 0.3]], tf.float64)
    after = ppo.move(state, tf.constant([0.0, 1.0], tf.float64))
    expected = [  # the states after a step of CartPole-v1 of gymnasium 1.4.0
        [0.096, -0.3957976546439626, 0.056, 0.6080233136061515],
        [0.096, -0.005625065781779709, 0.056, 0.02349585151852651],
    ]
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-14)
    states = [[2.39, 9, 0.2, 9], [2.41, 0, 0, 0], [0, 0, -0.21, 0]]
    np.testing.assert_array_equal(ppo.is_upright(tf.constant(states)), [1, 0, 0])


def test_advantages_are_normalized_over_the_steps_that_were_played():
    values, weights = np.array([[1.0, 5, 99], [3, 99, 99]]), np.array([[1.0, 1, 0], [1, 0, 0]])
    deviation = np.std([1, 5, 3])
    expected = (values - 3) / deviation
    np.testing.assert_allclose(ppo.normalize(values, weights), expected, rtol=1e-5)


def test_the_experiment_learns_to_balance_the_pole_for_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    keys = {
        "train.steps": 10, "eval.interval": 10, "data.global_batch_size": 16, "model.limit": 100,
        "model.updates": 2, "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    flags += ["--config=experiments/ppo.py", f"--workdir={tmp_path}"]
    assert main.run(["ctl", *flags]) == 0
    assert read_result(tmp_path)["eval"]["steps"] > 35  # 21 without training
