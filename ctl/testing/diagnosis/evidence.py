"""The data by which the rules recognize the cause of a difference between splits."""

from collections.abc import Mapping, Sequence
import dataclasses

from ctl.testing.diagnosis import probes
from ctl.testing.recording import Record
from ctl.testing.report import Difference
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec


@dataclasses.dataclass(frozen=True)
class SplitDifferences:
    """The records of several splits, and their differences.

    Attributes:
        records: the record of each split.
        references: global batch size -> the record on one replica.
        differences: the differences between them.
    """

    records: Mapping[Split, Record]
    references: Mapping[int, Record]
    differences: Sequence[Difference]

    def of_kind(self, *kinds: str) -> list[Difference]:
        """Returns the differences of some kinds, those on the simplest split first."""
        differences = [d for d in self.differences if d.kind in kinds]
        return sorted(
            differences,
            key=lambda d: (d.step, d.split.micro_batches, d.split.replicas, kinds.index(d.kind)),
        )

    def on_several_replicas(self) -> list[Difference]:
        """Returns the differences of updates and losses on more than one replica."""
        differences = [*self.of_kind("update"), *self.of_kind("loss")]
        return [d for d in differences if d.split.replicas > 1]


@dataclasses.dataclass(frozen=True)
class Evidence(SplitDifferences):
    """The differences between the splits of a trainer, and a method to measure its rows.

    Attributes:
        spec: what was run.
        precision: dtype of the computation.
    """

    spec: TrialSpec
    precision: str

    def rows(
        self, split: Split, *, training: bool = True
    ) -> tuple[probes.RowValues, probes.RowValues] | None:
        """Returns the first batch's rows on one replica and on a split, or None if unknown."""
        reference, values = (
            probes.compute_rows(self.spec, each, self.precision, training=training)
            for each in (split.reference, split)
        )
        return None if reference is None or values is None else (reference, values)


Finding = tuple[Difference, str]  # the difference to report first, and its cause
