"""The outputs of micro-batches, put together."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from ctl.built.outputs import concatenate
from tests.support.checks import one_line

ROWS = tf.reshape(tf.range(10), [5, 2])
Named = collections.namedtuple("Named", "logits attentions")


def put(function, sizes=(2, 3)):
    parts = tf.split(ROWS, sizes)
    return concatenate([function(part) for part in parts], sizes, "forward (model.py:3)")


def test_rows_are_concatenated_and_none_stays_none():
    result = put(
        lambda rows: {
            "named": Named(rows, None),
            "sparse": tf.sparse.from_dense(rows),
            "ragged": tf.RaggedTensor.from_tensor(rows),
            "texts": tf.strings.as_string(rows),
            "empty": (),
        }
    )
    assert isinstance(result["named"], Named) and result["named"].attentions is None
    assert result["empty"] == ()
    for value in (
        result["named"].logits,
        tf.sparse.to_dense(result["sparse"]),
        result["ragged"].to_tensor(),
        tf.strings.to_number(result["texts"], tf.int32),
    ):
        np.testing.assert_array_equal(value, ROWS)


def test_scalar_has_one_entry_per_micro_batch_if_there_are_several():
    values = put(lambda rows: [tf.reduce_sum(rows), 2.5])
    assert [value.numpy().tolist() for value in values] == [[6, 39], [2.5, 2.5]]
    assert put(lambda rows: 2.5, sizes=[5]).numpy() == 2.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda rows: {"a": [rows, tf.transpose(rows)]},
            r"shape \(2, 2\) for outputs\['a'\]\[1\], but",
        ),
        (lambda rows: rows[0], r"^forward \(model.py:3\) returned shape \(2,\) for outputs, but"),
        (lambda rows: {"b": rows, "a": object()}, r"returned an object for outputs\['a'\], but"),
        (lambda rows: (rows, None if len(rows) == 2 else rows), r"returned None for outputs\[1\]"),
    ],
)
def test_output_without_rows_is_rejected_by_its_place(function, message):
    with one_line(message):
        put(function)
