"""Losses that depend on the number of rows of a replica are rejected, and no others."""

import pytest
import tensorflow as tf

import ctl
from ctl.built.observers import Losses
from ctl.checks import row_count, searched_trace
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from tests.checks.traced_losses import BATCH, by_row


def count_rows(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


COUNTED = {
    "a quotient": lambda b: by_row(b["x"]) / count_rows(b["x"]),
    "its size": lambda b: by_row(b["x"]) / tf.cast(tf.size(b["x"]), tf.float32),
    "a sum of ones": lambda b: by_row(b["x"]) / tf.reduce_sum(tf.ones_like(b["x"])),
    "a sum of equal weights": lambda b: (
        by_row(b["x"]) / tf.reduce_sum(tf.zeros_like(b["x"][:, 0]) + 0.25)
    ),
    "in a function": lambda b: tf.function(lambda x: by_row(x) / count_rows(x))(b["x"]),
    "in a loop": lambda b: tf.while_loop(
        lambda i, x: i < 2, lambda i, x: (i + 1, x / count_rows(x)), [0, by_row(b["x"])]
    )[1],
    "the first half": lambda b: tf.where(
        tf.range(tf.shape(b["x"])[0]) < tf.shape(b["x"])[0] // 2, by_row(b["x"]), 0.0
    ),
}
NOT_COUNTED = {
    "the length of a sequence": lambda b: (
        tf.reduce_sum(b["series"], [1, 2]) / tf.cast(tf.shape(b["series"])[1], tf.float32)
    ),
    "tokens that exist": lambda b: tf.reduce_sum(tf.ones_like(b["series"]), [1, 2]),
    "the rows of all replicas": lambda b: (
        by_row(b["x"]) / count_rows(row_mask.record_global(b["x"]))
    ),
    "a shape": lambda b: by_row(tf.reshape(b["x"], [tf.shape(b["x"])[0], -1])),
}


def check_count(loss, *, split=True):
    def compute(batch):
        nonlocal trace
        trace = Trace(batch)
        with row_mask.examples(count=tf.shape(batch["x"])[0], trace=trace):
            return loss(batch)

    trace = None
    batch = {name: tf.constant(values) for name, values in BATCH.items()}
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), batch)
    losses = tf.function(compute).get_concrete_function(spec).structured_outputs
    found = Losses([losses], trace)
    row_count.check_count(found, lambda: (batch, None), name="loss", split=split)


@pytest.mark.parametrize("name", COUNTED)
def test_losses_that_depend_on_the_number_of_rows_are_rejected(name):
    with pytest.raises(ctl.UsageError, match=r"^loss returns losses that depend on the number of"):
        check_count(COUNTED[name])


def test_loss_by_the_number_of_rows_is_warned_of_if_one_replica_has_all_rows(caplog):
    searched_trace._warn.cache_clear()
    check_count(COUNTED["a quotient"], split=False)
    assert "As long as one replica computes the batch at once" in caplog.text


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_losses_that_do_not_depend_on_the_number_of_rows_are_accepted(name):
    check_count(NOT_COUNTED[name])
