"""The ways in which a global batch is split that a trainer is compared on. Loads no TensorFlow."""

from collections.abc import Sequence
import dataclasses
import math

from ctl.errors import UsageError

# The rate of the plain SGD that splits are compared by: an update is a multiple of its gradient.
RATE = 0.1


@dataclasses.dataclass(frozen=True, order=True)
class Split:
    """One way to compute the update of a global batch.

    Attributes:
        batch: rows of the global batch.
        replicas: how many share it.
        micro_batches: parts that a replica's rows are computed in.
    """

    batch: int
    replicas: int = 1
    micro_batches: int = 1

    @property
    def rows(self) -> int:
        """Rows that each replica gets, padding included."""
        return math.ceil(self.batch / self.replicas)

    @property
    def shares(self) -> list[int]:
        """How many rows exist on each replica."""
        left = [self.batch - r * self.rows for r in range(self.replicas)]
        return [min(max(0, rows), self.rows) for rows in left]

    @property
    def even(self) -> bool:
        """Whether all replicas have equally many rows."""
        return self.rows * self.replicas == self.batch

    @property
    def reference(self) -> "Split":
        """What it must be equal to: the whole batch at once on one replica."""
        return Split(self.batch)

    @property
    def feasible(self) -> bool:
        """Whether a replica has a row for each of its micro-batches."""
        return self.micro_batches <= self.rows

    def __str__(self) -> str:
        """Such as `2 replicas (3 + 2 rows of 5), accumulation 2`."""
        plural = "s" if self.replicas > 1 else ""
        rows = " + ".join(map(str, self.shares))
        return (
            f"{self.replicas} replica{plural} ({rows} rows of {self.batch}), "
            f"accumulation {self.micro_batches}"
        )


def sizes(replicas: int, micro_batches: int) -> list[int]:
    """Global batches that fall evenly to so many replicas, unevenly, and so that some get no row.

    Args:
        replicas: the most that are compared.
        micro_batches: the most micro-batches.
    """
    if replicas < 2:
        return [2 * micro_batches]
    # Of n + 1 rows each replica takes 2, and of three replicas or more the last have none.
    found = [replicas * micro_batches, replicas + 1]
    return [*found, 1] if replicas == 2 else found


def chosen(
    replicas: Sequence[int],
    accumulation: Sequence[int],
    batch_sizes: Sequence[int] | None = None,
    *,
    thorough: bool = False,
) -> list[Split]:
    """The splits to compare, references left out.

    Every number of replicas meets every batch size without accumulation, and accumulation with one
    of the batch sizes in turn; `thorough` takes all three together.

    Args:
        replicas: how many, such as (1, 2, 4).
        accumulation: micro-batches, such as (1, 2).
        batch_sizes: rows of a global batch; None for `sizes`.
        thorough: take every combination.

    Raises:
        UsageError: there is nothing to compare.
    """
    for name, values in (("replicas", replicas), ("accumulation", accumulation)):
        if not values or min(values) < 1:
            raise UsageError(f"{name} is {tuple(values)}, want numbers of at least 1.")
    batches = list(batch_sizes or sizes(max(replicas), max(accumulation)))
    found = []
    for i, count in enumerate(sorted(set(replicas))):
        for parts in sorted(set(accumulation)):
            all_sizes = [Split(batch, count, parts) for batch in batches]
            possible = [split for split in all_sizes if split.feasible]
            one_of_them = [possible[i % len(possible)]] if possible else []
            found += possible if parts == 1 or thorough else one_of_them
    found = [split for split in dict.fromkeys(found) if split != split.reference]
    if not found:
        raise UsageError(
            f"replicas={tuple(replicas)} and accumulation={tuple(accumulation)} leave nothing to "
            "compare with one replica: want 2 or more of one of them."
        )
    return found
