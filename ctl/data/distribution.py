"""Hands each input pipeline's dataset to a strategy.

tf.data's tuning thread (`autotune`) sleeps for up to a minute at a time, and cancelling it can miss
it (its wake-up comes before the flag it looks at): whoever drops an iterator then waits for the nap
to end. So datasets here are not tuned - AUTOTUNE then means a call a core - and on CPU devices they
reach the replicas directly: the per-device iterators that TensorFlow puts between are always tuned,
and copy from the host to where the data is already.
"""

from collections.abc import Callable
import re
from typing import Any

import tensorflow as tf

from ctl.data.layout import WorkerShard

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


def from_function(
    strategy: tf.distribute.Strategy, dataset_fn: DatasetFn, *, per_worker: bool = False
) -> Any:
    """`strategy.distribute_datasets_from_function`, with the options that suit its devices.

    Args:
        strategy: where the replicas are.
        dataset_fn: makes the dataset of an input pipeline.
        per_worker: an input pipeline must feed all replicas of a worker, in turn, as the author of
            a `PerReplica` expects; else it may feed one replica.

    Returns:
        Something to iterate over, with the data of every replica in each element.
    """

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return disable_autotune(dataset_fn(context))

    if type(strategy) is tf.distribute.OneDeviceStrategy and _on_cpu(strategy):
        return make(tf.distribute.InputContext())
    mirrored = type(strategy) is tf.distribute.MirroredStrategy
    if mirrored and _on_cpu(strategy) and not per_worker:
        return _per_replica(strategy, make)
    return strategy.distribute_datasets_from_function(make)


def per_worker(
    strategy: tf.distribute.Strategy,
    dataset_fn: Callable[[tf.distribute.InputContext, WorkerShard], tf.data.Dataset],
) -> Any:
    """Gives each worker of a coordinator a dataset of its own; the workers take turns.

    Args:
        strategy: with parameter servers.
        dataset_fn: makes the dataset of a worker, of one input pipeline and one replica.

    Returns:
        Something to make an iterator of, which `ClusterCoordinator.schedule` takes.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    names = (device.name for device in tf.config.list_logical_devices())
    count = len(
        {task[0] for task in map(re.compile(r"/job:worker/.*task:\d+").match, names) if task}
    )

    def make() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        turns = WorkerShard(count, tf.cast(index, tf.int64))
        return disable_autotune(dataset_fn(tf.distribute.InputContext(), turns))

    return coordinator.create_per_worker_dataset(make)


def global_batches(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Any:
    """`strategy.experimental_distribute_dataset`: splits each ready global batch."""
    return strategy.experimental_distribute_dataset(disable_autotune(dataset))


def _per_replica(strategy: tf.distribute.Strategy, dataset_fn: DatasetFn) -> Any:
    """Gives each replica an input pipeline of its own."""
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    # The strategy would do the same, unasked, with all datasets that it distributes from now on.
    workers = strategy.extended._input_workers_devices
    try:
        return strategy.distribute_datasets_from_function(dataset_fn, options)
    finally:
        strategy.extended._input_workers_devices = workers


def disable_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without tf.data's tuning thread, unless its author decided about it."""
    # A dataset that is made inside a function does not know its options.
    if not tf.inside_function() and dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _on_cpu(strategy: tf.distribute.Strategy) -> bool:
    return all("CPU" in device for device in strategy.extended.worker_devices)
