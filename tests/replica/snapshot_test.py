"""The variables that a forward pass assigns are restored if the update is skipped."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.replica.snapshot import Snapshot, assigned_in_forward_pass


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("applied", [True, False])
def test_values_are_restored_unless_the_update_was_applied(replicas, applied):
    where = testing.make_strategy(replicas)
    with where.scope():
        metric = tf_keras.metrics.Mean()
    where.run(lambda: metric.update_state(4.0))

    def replica_step():
        snapshot = Snapshot(metric.variables)
        metric.update_state(float("nan"))
        snapshot.restore_unless(tf.constant(applied))

    tf.function(lambda: where.run(replica_step))()
    for copy in testing.copies(where, metric.total):
        assert np.isnan(copy) if applied else copy == 4.0


def test_moving_statistics_and_metrics_are_assigned_but_not_weights():
    with testing.make_strategy(2).scope():
        model = tf_keras.Sequential([tf_keras.layers.BatchNormalization(input_shape=(3,))])
        model.untouched = tf.Variable(1.0, trainable=False)  # cannot be assigned by a replica
        metric = tf_keras.metrics.Mean()
        variables = assigned_in_forward_pass([model, model], [metric])
    assert [v.name for v in variables] == [
        *(v.name for v in model.layers[0].non_trainable_variables),
        *(v.name for v in metric.variables),
    ]
