"""The retrieval of experiments/two_tower.py, with small embeddings and few interactions."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from experiments.trainers import two_tower
from tests.gallery import curves

MODEL = dict(user_count=9, item_count=40, width=3, interactions=23, eval_interactions=13)


def make(replicas, negatives, micro_batches=1):
    optimizer = tf_keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-10)
    options = dict(model={**MODEL, "negatives": negatives}, micro_batches=micro_batches)
    return curves.build(two_tower.TwoTowerTrainer, replicas, optimizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("negatives", "micro_batches"), [(0, 1), (5, 2)])
def test_the_curve_is_that_of_one_device(negatives, micro_batches):
    one, two = make(1, negatives), make(2, negatives, micro_batches)
    losses = curves.assert_same(curves.train(one), curves.train(two))
    assert losses[-1] < losses[0]


def test_loss_is_the_softmax_over_the_other_items_of_the_batch():
    user, item = np.array([[1.0, 0], [0, 1], [2, 2]]), np.array([[1.0, 1], [0, 3], [1, 1]])
    # Rows 0 and 2 have item 4, so neither is an error of the other.
    losses = make(1, 0).per_example_loss({"item": tf.constant([4, 5, 4])}, (user, item))
    scores = [[1, 0], [3, 1, 1], [4, 6]]  # the own item first
    expected = [np.log(np.sum(np.exp(np.subtract(s, s[0])))) for s in scores]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_metrics_by_hand():
    items = np.array([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    users = np.array([[1.0, 0.5], [0, -1], [0, 1]])
    # Scores: 1, 0.5, 1.5, -1; 0, -1, -1, 0; 0, 1, 1, 0, of which equal ones are not higher.
    np.testing.assert_array_equal(two_tower.rank(users, items, np.array([1, 2, 2])), [2, 2, 0])
    metrics = two_tower.retrieval_metrics(np.array([0, 2, 99, 100]))
    assert metrics["recall_at_100"] == 0.75
    assert metrics["ndcg_at_100"] == pytest.approx((1 + 1 / 2 + 1 / np.log2(101)) / 4)


def test_users_take_items_with_higher_products_of_the_hidden_factors():
    users, items = two_tower.make_factors(50, 400)
    np.testing.assert_allclose(np.sum(items**2, axis=1), 1, rtol=1e-5)
    rows = two_tower.draw_interactions(users, items, 3000, seed=1)
    again = two_tower.draw_interactions(users, items, 3000, seed=1)
    np.testing.assert_array_equal(rows["item"], again["item"])
    best, chance = (
        two_tower.retrieval_metrics(np.asarray(two_tower.rank(users[u], items, rows["item"])))
        for u in (rows["user"], np.roll(rows["user"], 1))
    )
    assert best["recall_at_100"] > 0.9 and 0.2 < chance["recall_at_100"] < 0.3
    counts = np.bincount(rows["item"], minlength=400)
    assert counts.std() < 2 * counts.mean() ** 0.5  # all items are about equally frequent


@pytest.mark.slow
def test_the_experiment_trains_and_reports_the_best_possible_metrics(tmp_path):
    keys = {
        "train.steps": 40, "model.user_count": 20, "model.item_count": 300, "eval.interval": 40,
        "model.interactions": 40_000, "model.eval_interactions": 1000,
    }  # fmt: skip
    results = curves.run_experiment("two_tower", tmp_path, keys)["eval"]
    assert 0.4 < results["recall_at_100"] < results["best_recall_at_100"] < 1.0
