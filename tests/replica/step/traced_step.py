"""Traces functions as steps of a batch, and searches them for random numbers."""

import pytest
import tensorflow as tf

import ctl
from ctl.replica.arithmetic import row_mask
from ctl.replica.checks import random_search

ROWS, FEATURES = 4, 8


def trace(function, *, rows=ROWS, shape=(FEATURES,), allow=False, jit=False, parts=1):
    """Traces a function of a batch as a step, and searches it."""

    def step(x):
        with (
            row_mask.examples(
                count=x.shape[0],
                first_row=tf.constant(0, tf.int64),
                step=1,
                allow_unkeyed=allow,
                parts=parts,
            ) as examples,
            random_search.search(examples, x),
        ):
            return function(x)

    spec = tf.TensorSpec([rows, *shape], tf.float32)
    return tf.function(step, jit_compile=jit).get_concrete_function(spec)


def rejected(function, **arguments):
    with pytest.raises(ctl.UsageError) as caught:
        trace(function, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
