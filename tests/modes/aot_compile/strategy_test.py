"""SliceStrategy splits the batch and traces collectives as TensorFlow's own TPUStrategy does.

The real TPUStrategy is made without a TPU: its resolver reports two cores, and the CPU's devices take
their place. It can trace a step, but nothing can run it.
"""

import collections
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_system_metadata

import ctl
from ctl.hardware import strategies
from ctl.modes.aot_compile import problems, programs
from ctl.modes.aot_compile.strategy import AggregatedVariable, SliceStrategy
from ctl.replica.step.inner_loop import loop_of
from tests.support import reference_model

BATCH, CORES = 8, 2
DEVICE = "/job:localhost/replica:0/task:0/device:"


def make_for(strategy, **options):
    return reference_model.make_trainer(strategy, BATCH, precision="float32", **options)


def test_the_strategy_is_named_tpu():
    assert strategies.strategy_name(SliceStrategy(4)) == "tpu"


def test_a_replica_gets_its_part_of_the_global_batch():
    trainer = make_for(SliceStrategy(4))
    batch, row_mask = loop_of(trainer).pipeline.training_dataset(BATCH, start=0).element_spec
    assert {spec.shape[0] for spec in batch.values()} == {BATCH // 4}
    assert not isinstance(row_mask, tf.TensorSpec)


def test_global_batches_of_build_dataset_are_split_too():
    dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(BATCH)).batch(
        BATCH, drop_remainder=True
    )

    class Batched(reference_model.ReferenceTrainer):
        data_factory = staticmethod(lambda split: ctl.data.GlobalBatches(dataset.repeat()))

    trainer = make_for(SliceStrategy(4), cls=Batched)
    spec = loop_of(trainer).pipeline.training_dataset(BATCH, start=0).element_spec
    assert {s.shape[0] for s in tf.nest.flatten(spec)} == {BATCH // 4}


def test_a_nested_program_is_rejected_as_by_tpustrategy():
    class Nested(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: strategy.run(lambda: tf.constant(0.0)))
            return super().replica_step(batch)

    trainer = make_for(SliceStrategy(4), cls=Nested)
    with pytest.raises(ctl.UsageError, match="cannot be nested"):
        programs.export_train_step(trainer)


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Reports a TPU with two cores."""

    environment, task_type, task_id = "", "worker", 0

    def __init__(self):
        pass

    def get_tpu_system_metadata(self):
        names = ["CPU:0", *(f"TPU:{i}" for i in range(CORES))]
        devices = [types.SimpleNamespace(name=DEVICE + n, device_type=n[:3]) for n in names]
        return tpu_system_metadata.TPUSystemMetadata(CORES, 1, CORES, None, devices)

    def get_job_name(self):
        return "localhost"

    def master(self, *args, **kwargs):
        return ""

    get_master = master

    def cluster_spec(self):
        return tf.train.ClusterSpec({})


def make_tpu_strategy():
    strategy = tf.distribute.TPUStrategy(Resolver())
    strategy.extended._tpu_devices = np.array([[f"{DEVICE}CPU:{i}"] for i in range(CORES)])
    strategy._enable_packed_variable_in_eager_mode = False
    return strategy


def count_operations(strategy, **options):
    """The number of operations of each type in a train step."""
    trainer = make_for(strategy, **options)
    per_replica = make_for(SliceStrategy(CORES))
    element_spec = loop_of(per_replica).pipeline.training_dataset(BATCH, start=0).element_spec

    @tf.function
    def step(*tensors):
        trainer.train_step(iter([programs.pack_tensors(element_spec, tensors)]))

    specs = [spec for _, spec in programs.flatten_specs(element_spec)]
    graph = step.get_concrete_function(*specs).graph
    return collections.Counter(op.type for op in problems.list_operations(graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"loss_spike": 3.0}, {"norms": "global"}, {"micro_batches": 2}],
    ids=str,
)
def test_a_step_has_the_collectives_that_tpustrategy_traces(options):
    tpu = count_operations(make_tpu_strategy(), **options)
    traced = count_operations(SliceStrategy(CORES), **options)
    assert tpu["CrossReplicaSum"] > 0
    # TPUStrategy broadcasts the first replica's values by AllToAll, SliceStrategy by a sum.
    assert traced["XlaAllReduce"] == tpu["CrossReplicaSum"] + tpu["AllToAll"]


def test_a_conditional_update_is_rejected_under_both_strategies():
    for strategy in (make_tpu_strategy(), SliceStrategy(CORES)):
        with pytest.raises(ctl.UsageError, match="TensorFlow does not support on a TPU"):
            count_operations(strategy, on_non_finite="skip")


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
