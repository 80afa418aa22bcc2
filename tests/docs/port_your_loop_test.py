"""Before and after in docs/port-your-loop.md train the same weights, on one replica and on four."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.docs import pages
from tests.support import child

TEXT = (child.ROOT / "docs/port-your-loop.md").read_text()
SETUP = "\n\n".join(pages.blocks(TEXT.partition("\n## ")[0]))
TITLES = re.findall(r"^## (.*)$", TEXT, re.M)
PAIRS = {title: pages.blocks(f"port-your-loop#{title}") for title in TITLES}


@pytest.fixture(autouse=True)
def float64():
    tf_keras.backend.set_floatx("float64")
    yield
    tf_keras.backend.set_floatx("float32")


def train(code, replicas):
    tf_keras.utils.set_random_seed(0)
    names = {"make_strategy": lambda: testing.make_strategy(replicas)}
    for block in (SETUP, code):
        exec(compile(block, "docs/port-your-loop.md", "exec"), names)
    trained = [["critic", "generator"], ["network"], ["model"]]
    models = next(keys for keys in trained if keys[0] in names)
    return [weight for key in models for weight in names[key].get_weights()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def constant(zeros):
    return zeros + tf.range(1, zeros.shape[1] + 1, dtype=tf.float64) / 3


def fixed_numbers(shape):
    return constant(tf.zeros(shape, tf.float64))


def draws(monkeypatch, *, fixed):
    """Draws in float64; if `fixed`, the same numbers for each row, by ctl and by TensorFlow."""
    for name in ("normal", "uniform"):
        draw = functools.partial(getattr(ctl.random, name), dtype=tf.float64)
        same = lambda shape, draw=draw: constant(0 * draw(shape))  # noqa: E731
        monkeypatch.setattr(ctl.random, name, same if fixed else draw)
        if fixed:
            monkeypatch.setattr(tf.random, name, fixed_numbers)


@pytest.mark.parametrize("title", PAIRS)
def test_after_the_port_one_replica_trains_the_same_weights(title, monkeypatch):
    before, after = PAIRS[title]
    draws(monkeypatch, fixed=True)
    expected = train(before, 1)
    assert_equal(train(after, 1), expected)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("title", PAIRS)
def test_after_the_port_four_replicas_train_as_one(title, monkeypatch):
    """8 rows are 2 on each replica, and 5 rows are 2 + 2 + 1 + 0."""
    _, after = PAIRS[title]
    draws(monkeypatch, fixed=False)
    assert_equal(train(after, 4), train(after, 1))
