"""A function of a batch is traced once for each kind of batch, distributed or not."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.compile.traced_function import TracedFunction
from ctl.data.source import MaskedBatch


def rows(count):
    return {"x": np.arange(count * 2.0).reshape(count, 2), "label": np.ones(count)}


def distributed(count):
    dataset = tf.data.Dataset.from_tensor_slices(rows(count)).batch(count)
    return next(iter(testing.make_strategy(2).experimental_distribute_dataset(dataset)))


def sum_of(batch):
    local = testing.make_strategy(2).experimental_local_results
    values = [value for value in tf.nest.flatten(batch) if value is not None]
    return tf.add_n([tf.reduce_sum(part) for value in values for part in local(value)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: distributed(4), lambda: distributed(6)),
        (lambda: distributed(4), lambda: tf.nest.map_structure(tf.constant, rows(4))),
        (lambda: MaskedBatch(distributed(4), None), lambda: (distributed(4), None)),
        (lambda: rows(3), lambda: (rows(3), distributed(4))),  # of numpy
        (lambda: {"x": tf.ragged.constant([[1.0], [2.0, 3.0]])}, lambda: {"x": tf.ones([2])}),
    ],
)
def test_each_kind_of_batch_is_traced_once_and_keeps_its_structure(one, other):
    traced = []

    def function(batch):
        traced.append(tf.nest.map_structure(lambda value: type(value).__name__, batch))
        return sum_of(batch)

    compute = TracedFunction(function)
    for make in (one, other) * 3:
        batch = make()
        assert float(compute(batch)) == float(sum_of(batch))
    assert len(traced) == 2
    for names, make in zip(traced, (one, other), strict=True):
        tf.nest.assert_same_structure(names, make())


def test_no_batch_stays_in_memory():
    compute = TracedFunction(sum_of)
    batch = distributed(4)
    compute(batch)
    kept = weakref.ref(batch["x"])
    del batch
    gc.collect()
    assert kept() is None
