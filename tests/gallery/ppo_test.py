"""The reinforcement learning of experiments/ppo.py, with a small model and few episodes."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from experiments.trainers import ppo
from tests.gallery import curves


def train(replicas):
    optimizer, model = tf_keras.optimizers.Adam(1e-3), dict(width=4, updates=2, limit=50)
    return curves.train(curves.build(ppo.PpoTrainer, replicas, optimizer, batch=5, model=model))


@pytest.mark.slow
def test_the_curve_is_that_of_one_device():
    one = train(1)
    curves.assert_same(one, train(2))
    assert 10 < one[1][0]["steps"] < 50  # the lengths of the episodes are compared, too


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


@pytest.mark.slow
def test_the_experiment_learns_to_balance_the_pole_for_longer(tmp_path):
    keys = {
        "train.steps": 10, "eval.interval": 10, "data.global_batch_size": 16, "model.limit": 100,
        "model.updates": 1, "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    result = curves.run_experiment("ppo", tmp_path, keys)
    assert result["eval"]["steps"] > 35  # 21 without training
