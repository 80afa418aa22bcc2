"""Distributes the dataset of each input pipeline to the replicas of a strategy.

Two deviations from tf.distribute's defaults keep a run from waiting for tf.data. The autotune thread
of tf.data sleeps for up to a minute, and a cancellation can be missed (the notification is sent
before the flag is set that the thread checks); deleting an iterator then blocks until the sleep ends.
So autotuning is off here; AUTOTUNE then means one parallel call per core. On CPU devices the datasets
also go to the replicas directly: the per-device iterators that TensorFlow inserts are always
autotuned, and they copy data from the host to the host.
"""

from collections.abc import Callable
import contextlib
import itertools
import math
import re
from typing import Any

import tensorflow as tf

from ctl.data.layout import WorkerShard
from ctl.data.source import MaskedBatch, Nest
from ctl.errors import UsageError

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]
_WORKER = re.compile(r"/job:worker/.*task:\d+")


def from_function(
    strategy: tf.distribute.Strategy, dataset_fn: DatasetFn, *, per_worker: bool = False
) -> Any:
    """Calls `strategy.distribute_datasets_from_function` with the options that suit its devices.

    Args:
        strategy: the distribution strategy.
        dataset_fn: makes the dataset of one input pipeline.
        per_worker: use one input pipeline per worker, which feeds all its replicas, as `PerReplica`
            data requires. Otherwise each replica may get its own input pipeline.

    Returns:
        An iterable whose elements hold the data of every replica.
    """

    def untuned_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return disable_autotune(dataset_fn(context))

    # The exact types: subclasses may place replicas or data in other ways.
    if type(strategy) is tf.distribute.OneDeviceStrategy and _on_cpu(strategy):
        return untuned_dataset(tf.distribute.InputContext())
    mirrored = type(strategy) is tf.distribute.MirroredStrategy
    if mirrored and _on_cpu(strategy) and not per_worker:
        return _per_replica(strategy, untuned_dataset)
    return strategy.distribute_datasets_from_function(untuned_dataset)


def per_worker(
    strategy: tf.distribute.Strategy,
    dataset_fn: Callable[[tf.distribute.InputContext, WorkerShard], tf.data.Dataset],
) -> Any:
    """Creates one dataset on each worker of a `ClusterCoordinator`.

    Args:
        strategy: a parameter-server strategy.
        dataset_fn: makes the dataset of one worker, with one input pipeline and one replica.

    Returns:
        A per-worker dataset; its iterator can be passed to `ClusterCoordinator.schedule`.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    # A worker has several logical devices, but one task.
    matches = (_WORKER.match(device.name) for device in tf.config.list_logical_devices())
    num_workers = len({match[0] for match in matches if match})

    def worker_dataset() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        shard = WorkerShard(num_workers, tf.cast(index, tf.int64))
        return disable_autotune(dataset_fn(tf.distribute.InputContext(), shard))

    return coordinator.create_per_worker_dataset(worker_dataset)


def global_batches(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Any:
    """Splits each global batch with `strategy.experimental_distribute_dataset`."""
    return strategy.experimental_distribute_dataset(disable_autotune(dataset))


def explain_errors(
    dataset: Any, report: Callable[[int], contextlib.AbstractContextManager[None]]
) -> Any:
    """Makes the iteration by Python over distributed data raise the errors that `report` makes.

    The classes are subclasses of TensorFlow's, which a `tf.function` accepts as before.

    Args:
        dataset: the data, which is changed.
        report: returns what turns the errors of a batch, by its number, into others.

    Returns:
        The same data.
    """

    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        own, numbers = type(iterator), itertools.count()

        def read(self: Any) -> Any:
            number = next(numbers)
            try:
                return own.__next__(self)
            except tf.errors.OpError:
                with report(number):
                    raise

        if tf.executing_eagerly():
            _override(iterator, __next__=read)
        return iterator

    kind = type(dataset)
    _override(dataset, __iter__=iterate)
    return dataset


def _override(value: Any, **methods: Callable[..., Any]) -> None:
    kind = type(value)
    value.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def check_distributed(
    batch: Nest, strategy: tf.distribute.Strategy, *, most: int | None = None
) -> None:
    """Raises UsageError for a plain batch, which every replica would train on as a whole.

    Args:
        batch: the batch of a loop of the user.
        strategy: the strategy of the step.
        most: the number of rows that the batch may have, if that is known.
    """
    values = [value for value in tf.nest.flatten(batch) if value is not None]
    is_plain = not any(isinstance(v, tf.distribute.DistributedValues) for v in values)
    replicas = strategy.num_replicas_in_sync
    if replicas > 1 and is_plain:
        raise UsageError(
            f"The batch is not distributed over the {replicas} replicas, so each would train on all of "
            "it: iterate ctl.data.distribute(...), or a dataset of "
            "strategy.experimental_distribute_dataset."
        )
    if not values:
        raise UsageError("The batch is empty: it must hold at least one tensor.")
    if not is_plain and len(getattr(values[0], "values", ())) > replicas:
        raise UsageError("The batch is distributed by another strategy than the step's.")
    shapes = [
        tuple(getattr(x, "shape", ())) for x in strategy.experimental_local_results(values[0])
    ]
    rows = sum(shape[0] or 0 for shape in shapes if shape)
    # The replicas of a batch of ctl have the same number of rows, with padding.
    padded = math.ceil((most or 0) / replicas) * replicas if isinstance(batch, MaskedBatch) else 0
    if most and rows > max(most, padded):
        raise UsageError(
            f"The batch has {rows} rows, but global_batch_size is {most}: pass the number of rows of "
            "all replicas as global_batch_size, or make smaller batches."
        )


def has_equal_shares(batch: Nest, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas are known to have the same number of rows.

    Every replica must know the same: from a static number that differs between them, each would
    compute its own positions and denominator.
    """
    if isinstance(batch, MaskedBatch) or strategy.num_replicas_in_sync == 1:
        return True
    shares = strategy.experimental_local_results(tf.nest.flatten(batch)[0])
    sizes = {share.shape[0] for share in shares}
    # The shares of other processes are not known here.
    return len(shares) == strategy.num_replicas_in_sync and len(sizes) == 1


def disable_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disables tf.data's autotune thread, unless the dataset's options set it explicitly."""
    # The options of a dataset that is created inside a tf.function cannot be read.
    if not tf.inside_function() and dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _per_replica(strategy: tf.distribute.Strategy, dataset_fn: DatasetFn) -> Any:
    """Creates one input pipeline per replica."""
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    # The strategy remembers the replication mode and would apply it to every later dataset, for
    # example to `GlobalBatches`, so the previous value is restored.
    input_workers = strategy.extended._input_workers_devices
    try:
        return strategy.distribute_datasets_from_function(dataset_fn, options)
    finally:
        strategy.extended._input_workers_devices = input_workers


def _on_cpu(strategy: tf.distribute.Strategy) -> bool:
    return all("CPU" in device for device in strategy.extended.worker_devices)
