"""Which rows of a global batch fall to which replica."""

import dataclasses
import math

import tensorflow as tf

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class WorkerShard:
    """Which batches one of several workers takes that update by themselves.

    Attributes:
        count: how many workers take turns.
        index: the first batch that this one takes, a scalar int64 below `count`.
    """

    count: int
    index: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which rows of a global batch the replicas of one input pipeline hold.

    Attributes:
        global_batch_size: rows of a full global batch.
        replicas: replicas of all pipelines together.
        pipelines: input pipelines, one a worker as a rule.
        pipeline: which of them this is.
    """

    global_batch_size: int
    replicas: int
    pipelines: int = 1
    pipeline: int = 0

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UsageError(f"global_batch_size is {self.global_batch_size}, want at least 1.")

    @property
    def rows(self) -> int:
        """Rows that each replica gets."""
        return math.ceil(self.global_batch_size / self.replicas)

    @property
    def local_replicas(self) -> int:
        """Replicas that this pipeline feeds."""
        return self.replicas // self.pipelines

    @property
    def first_replica(self) -> int:
        """The first replica that this pipeline feeds."""
        return self.pipeline * self.local_replicas

    @property
    def even(self) -> bool:
        """Whether all replicas get equally many rows of a full batch."""
        return self.rows * self.replicas == self.global_batch_size

    def shares(self) -> list[int]:
        """How many rows of a full batch exist on each replica."""
        ends = [min((r + 1) * self.rows, self.global_batch_size) for r in range(self.replicas)]
        return [max(0, end - r * self.rows) for r, end in enumerate(ends)]

    @classmethod
    def of(cls, context: tf.distribute.InputContext, global_batch_size: int) -> "Layout":
        """The layout of the pipeline that `context` describes."""
        return cls(
            global_batch_size=global_batch_size,
            replicas=context.num_replicas_in_sync,
            pipelines=context.num_input_pipelines,
            pipeline=context.input_pipeline_id,
        )
