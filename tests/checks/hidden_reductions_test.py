"""Ops over the rows that no batch shows to combine them are named in one line."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from tests.checks.traced_losses import BATCH, ROWS, by_row, trace


def test_reduction_that_no_batch_shows_is_reported_in_one_line(caplog):
    limit = tf.Variable([0.0], trainable=False)
    trace(lambda b: by_row(b["x"]) * tf.exp(limit[0] * tf.reduce_max(by_row(b["x"]))))
    assert not caplog.text  # not even another maximum changes a row

    def loss(batch):
        x = by_row(batch["x"])
        return x * (1 + tf.nn.relu(tf.reduce_max(tf.nn.relu(x - 1e6)) - 0.4))

    trace(loss)
    (line,) = caplog.messages
    assert line.startswith("tests/") and "reduces the rows" in line and "(Max)" in line


def clipped(batch):
    return by_row(tf.clip_by_norm(batch["x"] / 1e6, 4.0))


def hard(batch, select):
    """The losses above a threshold, or the largest ones if these are too few."""
    losses = by_row(batch["x"]) + 5
    return tf.where(select(losses), losses, 0.0)


BOUNDED = {
    "clip by norm": (clipped, "Sum"),
    "maximum": (lambda b: by_row(b["x"]) * tf.maximum(tf.reduce_max(tf.tanh(b["x"])), 3.5), "Max"),
    "minimum with a sorted loss": (
        lambda b: hard(b, lambda x: x >= tf.minimum(tf.sort(x)[-2], 4.0)), "TopKV2"
    ),
    "number of losses above a threshold": (
        lambda b: hard(b, lambda x: tf.where(
            tf.math.count_nonzero(x > 4.0) >= 2, x > 4.0, x >= tf.sort(x)[-2]
        )), "Sum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_reduction_that_a_bound_hides_in_all_batches_is_reported_in_one_line(name, caplog):
    loss, op = BOUNDED[name]
    trace(loss)
    (line,) = caplog.messages
    assert line.startswith("tests/") and "reduces the rows" in line and f"({op})" in line


RARE = lambda b: tf.cast(b["group"] == 7, tf.float32)  # noqa: E731
SEVENS = lambda b: tf.gather([0.0] * 7 + [1.0], b["group"])  # noqa: E731
# They depend on other rows if there are rows of group 7, as in no batch.
RARE_ROWS = {
    "pairs by a product of matrices": lambda b: tf.linalg.matvec(
        RARE(b)[:, None] @ RARE(b)[None], by_row(b["x"])
    ),
    "the two hardest": lambda b: by_row(b["x"]) * tf.cast(
        RARE(b) * by_row(b["x"]) >= tf.math.top_k(RARE(b) * by_row(b["x"]), 2).values[-1], tf.float32
    ),
    "places": lambda b: by_row(b["x"]) * (1 + RARE(b) * tf.cumsum(RARE(b))),
    "mean": lambda b: by_row(b["x"]) + tf.math.divide_no_nan(
        tf.reduce_sum(RARE(b) * by_row(b["x"])), tf.reduce_sum(RARE(b))
    ),
}  # fmt: skip
# These do not compare.
LOOKED_UP = {
    "Sum": lambda b: by_row(b["x"]) / tf.maximum(tf.reduce_sum(SEVENS(b)), 1.0),
    "sum by sum": lambda b: by_row(b["x"]) + tf.math.divide_no_nan(
        tf.reduce_sum(SEVENS(b) * by_row(b["x"])), tf.reduce_sum(SEVENS(b))
    ),
    "MatMul": lambda b: by_row(b["x"]) + tf.linalg.matvec(
        SEVENS(b)[:, None] @ SEVENS(b)[None], by_row(b["x"])
    ),
    "Cumsum": lambda b: by_row(b["x"]) * (1 + tf.cumsum(SEVENS(b))),
    "Bincount": lambda b: by_row(b["x"]) * (1 + tf.math.bincount(
        b["group"], minlength=8, maxlength=8, dtype=tf.float32
    )[7]),
    "Mul": lambda b: by_row(b["x"]) + tf.linalg.matvec(
        SEVENS(b)[:, None] * SEVENS(b)[None], by_row(b["x"])
    ),
    "Roll moves": lambda b: by_row(b["x"]) + SEVENS(b) * tf.roll(by_row(b["x"]), 1, 0),
    "Cumsum below a capacity": lambda b: by_row(b["x"]) * tf.cast(
        tf.cumsum(tf.cast(b["x"][:, 0] > 0, tf.float32)) < 20.0, tf.float32
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RARE_ROWS)
def test_rows_that_are_compared_with_a_number_of_no_batch_are_made_up(name, monkeypatch):
    monkeypatch.setitem(BATCH, "group", np.arange(ROWS) % 3)
    with pytest.raises(ctl.UsageError, match=r"_test\.py:\d+.* combines rows"):
        trace(RARE_ROWS[name])


@pytest.mark.parametrize("name", LOOKED_UP)
def test_op_that_combines_rows_which_no_batch_has_is_reported_in_one_line(
    name, monkeypatch, caplog
):
    monkeypatch.setitem(BATCH, "group", np.arange(ROWS) % 3)
    trace(LOOKED_UP[name])
    (line,) = caplog.messages
    assert f"{'moves' if 'moves' in name else 'reduces'} the rows" in line
    assert name.split()[0].removeprefix("sum") in line


def unique(batch):
    """A lookup of each token that exists, once."""
    tokens, places = tf.unique(tf.reshape(batch["tokens"], [-1]))
    values = tf.gather(tf.sin(tf.cast(tokens, tf.float32)), places)
    return by_row(tf.reshape(values, tf.shape(batch["tokens"])))


def ctc(batch):
    """Loops of TensorFlow over time, which begin with the rows."""
    logits = tf.tile(batch["series"], [1, 4, 2])
    times = tf.fill(tf.shape(logits)[:1], logits.shape[1])
    lengths = tf.minimum(batch["length"], 3)
    return tf.nn.ctc_loss(batch["tokens"] % 4, logits, lengths, times, False, blank_index=4)


BY_ROW = {
    "CTC": ctc,
    "map": lambda b: tf.vectorized_map(lambda row: tf.reduce_sum(row**2), b["series"]),
    "unique": unique,
}


@pytest.mark.parametrize("name", BY_ROW)
def test_ops_over_all_rows_that_keep_them_apart_cause_no_line(name, caplog):
    trace(BY_ROW[name])
    assert "the rows of a replica" not in caplog.text
