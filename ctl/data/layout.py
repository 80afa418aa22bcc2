"""Assigns the rows of a global batch to replicas, and global batches to workers."""

import dataclasses
import math
import numbers

import tensorflow as tf

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class WorkerShard:
    """The batches of one of several workers that update asynchronously: every `num_workers`-th.

    Attributes:
        num_workers: how many workers share the training stream.
        index: the position of this worker's first batch, a scalar int64 below `num_workers`.
    """

    num_workers: int
    index: tf.Tensor  # a tensor, since a worker learns its index only when it creates its dataset


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of a global batch that the replicas of one input pipeline hold.

    Replica r holds the rows [r b, (r + 1) b), where b is `rows_per_replica`. If the replicas do not
    divide the global batch, the last replicas hold fewer rows, or none, and are padded to b rows.

    Attributes:
        global_batch_size: number of rows in a full global batch.
        replicas: number of replicas that all input pipelines feed.
        pipelines: number of input pipelines, usually one per worker.
        pipeline: the index of this input pipeline.
    """

    global_batch_size: int
    replicas: int
    pipelines: int = 1
    pipeline: int = 0

    def __post_init__(self) -> None:
        size = self.global_batch_size
        if not isinstance(size, numbers.Integral) or size < 1:
            raise UsageError(
                f"global_batch_size is {size!r}, but must be an integer of at least 1."
            )

    @classmethod
    def from_context(cls, context: tf.distribute.InputContext, global_batch_size: int) -> "Layout":
        """Returns the layout of the input pipeline that `context` describes."""
        return cls(
            global_batch_size=global_batch_size,
            replicas=context.num_replicas_in_sync,
            pipelines=context.num_input_pipelines,
            pipeline=context.input_pipeline_id,
        )

    @property
    def rows_per_replica(self) -> int:
        """Rows in a per-replica batch, including padding."""
        return math.ceil(self.global_batch_size / self.replicas)

    @property
    def local_replicas(self) -> int:
        """Number of replicas that this input pipeline feeds."""
        return self.replicas // self.pipelines

    @property
    def first_replica(self) -> int:
        """Index of the first replica that this input pipeline feeds."""
        return self.pipeline * self.local_replicas

    @property
    def even(self) -> bool:
        """Whether the replicas divide the global batch, so that no replica needs padding."""
        return self.rows_per_replica * self.replicas == self.global_batch_size

    def row_counts(self) -> list[int]:
        """Returns the number of rows of a full global batch on each replica, without padding."""
        # The rows that earlier replicas leave for this one; negative after the last row.
        rows = self.rows_per_replica
        unassigned = (self.global_batch_size - replica * rows for replica in range(self.replicas))
        return [min(max(0, count), rows) for count in unassigned]
