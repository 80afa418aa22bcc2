"""Updates of variables that all replicas share are all-reduced in the exported step."""

import tensorflow as tf

from ctl.modes.aot_compile.aggregated_variable import AggregatedVariable
from ctl.modes.aot_compile.strategy import SliceStrategy


def test_only_variables_with_one_aggregated_value_are_all_reduced():
    with SliceStrategy(4).scope():
        metric = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        plain = tf.Variable(0.0)
        per_replica = tf.Variable(
            0.0,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )
    assert isinstance(metric, AggregatedVariable)
    assert not isinstance(plain, AggregatedVariable)
    assert not isinstance(per_replica, AggregatedVariable)


def test_values_of_the_first_replica_are_broadcast_also_in_64_bits(make_trainer, all_reduce_shapes):
    # The spike detector has two: the mean of the losses, in float32, and their number, in int64.
    with_spikes = all_reduce_shapes(make_trainer(4, loss_spike=3.0))
    assert len(with_spikes) == len(all_reduce_shapes(make_trainer(4))) + 2
