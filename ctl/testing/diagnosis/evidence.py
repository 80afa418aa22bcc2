"""The data by which the checks and rules find a mistake and its cause."""

from collections.abc import Mapping, Sequence
import dataclasses

from ctl.testing.equivalence_report import Difference
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import Split
from ctl.testing.subjects.base import Calibration, SplitRun, Subject

Finding = tuple[Difference, str]  # the difference to report first, and its cause


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The records of several splits, and the loop to measure it further.

    Attributes:
        subject: what was run.
        run: its first run on one replica.
        calibration: how precisely it can be compared.
        records: the record of each split.
        references: global batch size -> the record on one replica.
        recomputes: whether the step recomputes activations.
        differences: the differences between the splits.
        notes: what could not be checked, and why; checks add to it.
    """

    subject: Subject
    run: SplitRun
    calibration: Calibration
    records: Mapping[Split, LoopRecord]
    references: Mapping[int, LoopRecord]
    recomputes: bool = False
    differences: Sequence[Difference] = ()
    notes: list[str] = dataclasses.field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[Difference]:
        """Returns the differences of some kinds, those on the simplest split first."""
        differences = [d for d in self.differences if d.kind in kinds]
        return sorted(
            differences,
            key=lambda d: (d.step, d.split.micro_batches, d.split.replicas, kinds.index(d.kind)),
        )
