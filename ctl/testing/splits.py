"""The ways to split a global batch on which a loop is compared."""

from collections.abc import Sequence
import dataclasses
import math

from ctl.errors import UsageError

# Learning rate of the plain SGD that splits are compared under: an update is -RATE * gradient.
RATE = 0.1


@dataclasses.dataclass(frozen=True, order=True)
class Split:
    """One way to compute the update of a global batch.

    Attributes:
        batch: global batch size.
        replicas: number of replicas.
        micro_batches: gradient accumulation steps.
    """

    batch: int
    replicas: int = 1
    micro_batches: int = 1

    @property
    def rows_per_replica(self) -> int:
        """Rows of each per-replica batch, padding included."""
        return math.ceil(self.batch / self.replicas)

    @property
    def row_counts(self) -> list[int]:
        """Number of real rows on each replica."""
        rows = self.rows_per_replica
        return [min(max(0, self.batch - r * rows), rows) for r in range(self.replicas)]

    def shares(self, indexes: Sequence[int]) -> list[list[int]]:
        """Returns the indexes of the real rows on each replica.

        Args:
            indexes: [batch] indexes of the rows of the global batch.
        """
        rows = self.rows_per_replica
        return [list(indexes[r * rows :][:count]) for r, count in enumerate(self.row_counts)]

    @property
    def even(self) -> bool:
        """Whether all replicas have the same number of real rows."""
        return self.rows_per_replica * self.replicas == self.batch

    @property
    def reference(self) -> "Split":
        """The split that defines the right result: the global batch at once on one replica."""
        return Split(self.batch)

    @property
    def feasible(self) -> bool:
        """Whether each micro-batch of a replica has at least one row."""
        return self.micro_batches <= self.rows_per_replica

    @property
    def replica_rows(self) -> str:
        """The replicas and their rows, for example `2 replicas (3 + 2 rows)`."""
        rows = " + ".join(map(str, self.row_counts))
        return f"{self.replicas} replica{'s' * (self.replicas > 1)} ({rows} rows)"

    def __str__(self) -> str:
        """Returns, for example, `2 replicas (3 + 2 rows), accumulation 2`."""
        accumulation = f", accumulation {self.micro_batches}" * (self.micro_batches > 1)
        return self.replica_rows + accumulation


def default_batch_sizes(replicas: int, micro_batches: int) -> list[int]:
    """Returns batch sizes that split evenly, unevenly, and with replicas that have no row.

    Args:
        replicas: the largest number of replicas.
        micro_batches: the largest number of micro-batches.
    """
    if replicas < 2:
        return [2 * micro_batches]
    # Each replica takes 2 of n + 1 rows. With three or more replicas the last one has none; with
    # two, a batch of one row leaves the second without any.
    sizes = [replicas * micro_batches, replicas + 1]
    return [*sizes, 1] if replicas == 2 else sizes


def choose_splits(
    replicas: Sequence[int],
    accumulation: Sequence[int],
    batch_sizes: Sequence[int] | None = None,
    *,
    thorough: bool = False,
) -> list[Split]:
    """Chooses the splits to compare with their references.

    Every number of replicas is combined with every batch size without accumulation, and with one
    batch size with accumulation.

    Args:
        replicas: numbers of replicas, such as (1, 2, 4).
        accumulation: numbers of micro-batches, such as (1, 2).
        batch_sizes: global batch sizes; `default_batch_sizes` if None.
        thorough: take all combinations of the three.

    Returns:
        The splits, without the references themselves.

    Raises:
        UsageError: the arguments leave nothing to compare.
    """
    for name, values in (("replicas", replicas), ("accumulation", accumulation)):
        if not values or min(values) < 1:
            raise UsageError(f"{name} is {tuple(values)}, but requires numbers of at least 1.")
    batches = list(batch_sizes or default_batch_sizes(max(replicas), max(accumulation)))
    splits = []
    for i, count in enumerate(sorted(set(replicas))):
        for parts in sorted(set(accumulation)):
            feasible = [s for batch in batches if (s := Split(batch, count, parts)).feasible]
            if feasible and parts > 1 and not thorough:
                feasible = [feasible[i % len(feasible)]]
            splits += feasible
    splits = [split for split in dict.fromkeys(splits) if split != split.reference]
    if not splits:
        raise UsageError(
            f"replicas={tuple(replicas)} and accumulation={tuple(accumulation)} leave nothing to "
            "compare with one replica: include a number of at least 2 in one of them."
        )
    return splits
