"""The plan of a trainer's updates: its options, resolved once by `planning.make_plan`."""

import dataclasses
from typing import Any

import tensorflow as tf

from ctl.configs.options import TrainerOptions
from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.keras import precision


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resolved options of one trainer.

    Attributes:
        options: the options as the user gave them.
        layout: which replica holds which rows of a global batch.
        strategy: the name of the strategy, such as "mirrored".
        full_batches: whether every training batch has exactly `layout.global_batch_size` rows.
        xla: what XLA compiles; never "auto".
        xla_reason: the reason for `xla`, in a few words.
        sync_batch_norm: whether the model normalizes by the statistics of the global batch.
        string_features: whether a batch contains strings.
        own_replica_step: whether the trainer overrides `replica_step`.
        own_train_step: whether the trainer overrides `train_step`.
        has_loss: whether the trainer defines `per_example_loss`, which evaluation reports.
        own_parts: whether the user adds parts to the update.
        compiles_collectives: whether XLA can compile complete steps of several replicas.
    """

    options: TrainerOptions
    layout: Layout
    strategy: str
    full_batches: bool
    xla: str
    xla_reason: str
    sync_batch_norm: bool
    string_features: bool
    own_replica_step: bool
    own_train_step: bool
    has_loss: bool = True
    own_parts: bool = False
    compiles_collectives: bool = False

    @property
    def dtype(self) -> tf.DType:
        """The dtype of variables, losses, denominators and reductions."""
        return tf.as_dtype(precision.of(self.options.precision).floatx)

    @property
    def reduce_dtype(self) -> tf.DType | None:
        """The dtype that gradients are reduced in; None for their own dtype."""
        return tf.as_dtype(self.options.all_reduce_dtype) if self.options.all_reduce_dtype else None

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that one replica computes; a logical shard is one, too."""
        shards = self.options.logical_shards
        if shards:
            return shards // self.layout.replicas
        return self.options.micro_batches

    @property
    def is_split(self) -> bool:
        """Whether several replicas or micro-batches compute the global batch."""
        return self.layout.replicas * self.micro_batches > 1

    @property
    def even(self) -> bool:
        """Whether all micro-batches have the same number of rows, without padding.

        Only then is the mean over them the mean over the batch.
        """
        rows = self.layout.rows_per_replica
        return self.layout.even and self.full_batches and rows % self.micro_batches == 0

    @property
    def isolation(self) -> str:
        """Why a layer or a loss cannot read the rows of the complete global batch; empty if it can.

        It is the end of a message, such as "but ...: set ...".
        """
        options = self.options
        if options.logical_shards > 1:
            return "but runtime.logical_shards computes one shard at a time: set it to 0."
        if self.micro_batches > 1:
            return (
                "but a micro-batch is computed without the others: set optimizer.micro_batches=1."
            )
        if self.xla == "gradients" and self.layout.replicas > 1:
            return (
                "but runtime.xla=gradients compiles the model and the loss without the reductions over "
                "replicas: choose runtime.xla=autocluster or off."
            )
        return ""

    @property
    def compiles_micro_batches(self) -> bool:
        """Whether XLA compiles the forward and the backward pass as one program."""
        return self.xla in ("loop", "step", "gradients")

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the complete step of a replica as one program, with its reductions."""
        return self.xla in ("loop", "step")

    @property
    def checks_finite(self) -> bool:
        """Whether steps that are not finite are recorded.

        Workers of parameter servers step independently, so no step can be skipped on all of them.
        """
        is_coordinated = strategies.STRATEGIES[self.strategy].coordinated
        return self.options.on_non_finite != "ignore" and not is_coordinated

    @property
    def skips(self) -> bool:
        """Whether an update that is not finite is skipped."""
        return self.checks_finite and self.options.on_non_finite == "skip"

    @property
    def per_micro_batch(self) -> bool:
        """Whether synchronized batch normalization uses the statistics of a micro-batch."""
        return bool(self.options.model.get("sync_batch_norm") == "per_micro_batch")

    @property
    def values(self) -> dict[str, Any]:
        """The values and facts that the rules depend on."""
        return {
            **self.options.by_key(),
            "runtime.xla": self.xla,
            "replicas": self.layout.replicas,
            "sync_batch_norm": self.sync_batch_norm,
            "per_micro_batch": self.per_micro_batch,
            "batch": self.layout.global_batch_size,
            "rows_per_replica": self.layout.rows_per_replica,
            "full_batches": self.full_batches,
            "string_features": self.string_features,
            "strategy": self.strategy,
            "compiles_collectives": self.compiles_collectives,
            "own_parts": self.own_parts,
        }

    def check_own_dataset(self) -> None:
        """Raises a UsageError if `trainer.train_dataset` cannot be set under these options."""
        if self.xla == "loop":
            raise UsageError(
                "runtime.xla=loop reads many batches at a time: choose runtime.xla=step to set "
                "train_dataset."
            )
        if self.options.on_non_finite == "rollback":
            raise UsageError(
                "train.on_non_finite=rollback reads batches again, which is possible only with the "
                "data of build_dataset: choose stop, skip or ignore to set train_dataset."
            )
