"""Layout: which rows of a global batch each replica holds."""

import pytest
import tensorflow as tf

import ctl
from ctl.data.layout import Layout


@pytest.mark.parametrize(
    ("batch", "replicas", "row_counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (5, 2, [3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (3, 4, [1, 1, 1, 0]),
        (130, 4, [33, 33, 33, 31]),
        (5, 8, [1, 1, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_rows_fill_the_replicas_in_order(batch, replicas, row_counts):
    layout = Layout(batch, replicas)
    assert layout.row_counts() == row_counts
    assert layout.rows_per_replica == row_counts[0]
    assert layout.even == (len(set(row_counts)) == 1)


def test_layout_of_an_input_context_knows_its_first_replica():
    context = tf.distribute.InputContext(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
    )
    layout = Layout.from_context(context, 7)
    assert layout == Layout(7, replicas=4, pipelines=2, pipeline=1)
    assert (layout.first_replica, layout.local_replicas) == (2, 2)


def test_empty_global_batch_is_rejected():
    with pytest.raises(ctl.UsageError, match="global_batch_size is 0, but must be at least 1"):
        Layout(0, 1)
