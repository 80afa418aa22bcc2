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
from ctl.built.inner_loop import loop_of
from ctl.hardware import strategies
from ctl.modes.aot_compile import problems, programs
from ctl.modes.aot_compile.strategy import AggregatedVariable, SliceStrategy
from tests.support import reference_model

BATCH, CORES = 8, 2
DEVICE = "/job:localhost/replica:0/task:0/device:"


def make_for(strategy, **options):
    return reference_model.make_trainer(strategy, BATCH, precision="float32", **options)


class Batched(reference_model.ReferenceTrainer):
    """Its data are global batches already."""

    @staticmethod
    def data_factory(split):
        dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(BATCH))
        return ctl.data.GlobalBatches(dataset.batch(BATCH, drop_remainder=True).repeat())


@pytest.mark.parametrize("cls", [reference_model.ReferenceTrainer, Batched])
def test_a_replica_gets_its_part_of_the_global_batch(cls):
    trainer = make_for(SliceStrategy(4), cls=cls)
    spec = tf.nest.flatten(loop_of(trainer).pipeline.training_dataset(BATCH, start=0).element_spec)
    tensors = [each for each in spec if isinstance(each, tf.TensorSpec)]
    # There is no mask of rows.
    assert [each.shape[0] for each in tensors] == [BATCH // 4] * len(reference_model.examples())


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
@pytest.mark.parametrize("options", [{"loss_spike": 3.0}, {"micro_batches": 2}], ids=str)
def test_a_step_has_the_collectives_that_tpustrategy_traces(options):
    tpu = count_operations(make_tpu_strategy(), **options)
    traced = count_operations(SliceStrategy(CORES), **options)
    assert tpu["CrossReplicaSum"] > 0
    # TPUStrategy broadcasts the first replica's values by AllToAll, SliceStrategy by a sum. The detector
    # of spikes has two: the mean of the losses, in float32, and their number, in int64.
    assert traced["XlaAllReduce"] == tpu["CrossReplicaSum"] + tpu["AllToAll"]


def test_a_conditional_update_is_rejected_under_both_strategies():
    for strategy in (make_tpu_strategy(), SliceStrategy(CORES)):
        with pytest.raises(ctl.UsageError, match="TensorFlow does not support on a TPU"):
            count_operations(strategy, on_non_finite="skip")


def test_only_variables_with_one_aggregated_value_are_all_reduced():
    strategy = SliceStrategy(4)
    assert strategies.strategy_name(strategy) == "tpu"
    options = {"aggregation": tf.VariableAggregation.SUM}
    per_replica = {**options, "synchronization": tf.VariableSynchronization.ON_READ}
    with strategy.scope():
        variables = [tf.Variable(0.0, **given) for given in (options, {}, per_replica)]
    kinds = [isinstance(each, AggregatedVariable) for each in variables]
    assert kinds == [True, False, False]
