"""Reads streams of `(batch, row_mask)` as lists of ids, for the tests of this folder."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import distribution
from ctl.data.data_errors import report_data_errors
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout

# (global batch size, replicas, input pipelines): 2 + 2 + 1 + 0 rows, so uneven and empty.
UNEVEN = (5, 4, 2)


def one_line(function, *arguments, **keywords):
    """The message of the UsageError that a function raises."""
    with pytest.raises(ctl.UsageError) as error:
        function(*arguments, **keywords)
    message = str(error.value)
    assert "\n" not in message
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return message


def check_data(data, split):
    """The spec of a batch of what `build_dataset` returned for a split."""
    return kind_of(data, split).check(split)


def read_all(source):
    """All examples of a source, in order."""
    return source.gather(tf.range(len(source), dtype=tf.int64))


def lists(source):
    """All examples of a source, in order, as lists."""
    return {name: value.numpy().tolist() for name, value in read_all(source).items()}


def numbers(count):
    """A dataset of examples {"id": 0}, {"id": 1}, ..., not shuffled."""
    return tf.data.Dataset.range(count).map(lambda i: {"id": i})


def pipeline_layouts(batch, replicas, pipelines):
    """The layouts of all input pipelines."""
    return [Layout(batch, replicas, pipelines, p) for p in range(pipelines)]


def read_steps(streams, layout, steps):
    """Reads the streams of all pipelines: for each step, the element of every replica."""
    local = layout.local_replicas
    elements = [
        list(itertools.islice(distribution.disable_autotune(stream), steps * local))
        for stream in streams
    ]
    return [
        [e for pipeline in elements for e in pipeline[step * local : (step + 1) * local]]
        for step in range(steps)
    ]


def read_batches(data, batch, steps, *, start=0, seed=3):
    """The batches of training steps on one replica."""
    stream = kind_of(data).training(Layout(batch, 1), seed=seed, start=start)
    return [step[0].batch for step in read_steps([stream], Layout(batch, 1), steps)]


def read_rows(data, name, batch, steps, **options):
    """The values of one feature in training steps on one replica."""
    return np.concatenate([b[name] for b in read_batches(data, batch, steps, **options)])


def read_epoch(source):
    """The ids of an epoch, without an incomplete batch, with errors as in a run."""
    with report_data_errors("training", dict):
        return read_rows(source, "id", 5, len(source) // 5).tolist()


def real_ids(step, name="id"):
    """The ids of the rows that are not padding, or another feature, in the order of the replicas."""
    real = [b[name] if mask is None else b[name][mask == 1] for b, mask in step]
    return [row for rows in real for row in rows.numpy()]


def check_rows_and_padding(step, layout, size):
    """Checks that each replica has its contiguous rows, then masked copies of the batch's last row.

    Args:
        step: the elements of all replicas.
        layout: the layout of any pipeline.
        size: number of rows in this global batch.
    """
    last, rows = real_ids(step)[-1], layout.rows_per_replica
    for replica, (batch, row_mask) in enumerate(step):
        ids = batch["id"].numpy()
        real = max(0, min(rows, size - replica * rows))
        assert len(ids) == rows
        assert (ids[real:] == last).all()
        if row_mask is None:
            assert real == rows
        else:
            assert row_mask.dtype == tf.float32
            assert row_mask.numpy().tolist() == [1] * real + [0] * (rows - real)
        assert np.array_equal(batch["x"], np.stack([2 * ids + 0.5, 2 * ids + 1.5], axis=1))
