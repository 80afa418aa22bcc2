"""A trace whose losses are searched, and how a check of it reports what it finds."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.checks.probe_error import FAILURES, ProbeError
from ctl.checks.read_batches import ReadBatch, read_values
from ctl.errors import UsageError
from ctl.rows.trace import Trace, symbolic

_LOG = logging.getLogger("ctl")
ACCEPT = "or accept it with allow_row_coupling=True (runtime.allow_row_coupling)"
FIX = (
    "use ctl.replica.all_gather(x), the rows of the global batch, from which ctl.replica.positions(x) "
    "or ctl.random.permutation_of_batch() select, or ctl.SyncBatchNormalization for statistics"
)
PLACE_FIX = (
    "use ctl.replica.positions(x), the places of these rows among the rows of the global batch, which "
    "ctl.replica.all_gather(x) returns"
)
_SHOWN = 100  # characters of an error
COUNT_FIX = (
    "leave out numbers of replicas and of rows, since ctl divides by the weight of the global batch, "
    "and read the rows of all replicas by ctl.replica.all_gather(x)"
)
COMBINES = "combines rows of the same replica or micro-batch"
Check = Callable[[Sequence[ReadBatch]], object]


class Suspect(NamedTuple):
    """Code because of which one replica may compute another update for the same rows.

    Attributes:
        place: the user's line, or function.
        use: what it does, as the end of a sentence about it.
        fix: what to do.
        is_seen: whether the trace shows it, so that a line is printed where nothing can be compared.
    """

    place: str
    use: str
    fix: str
    is_seen: bool = True


@dataclasses.dataclass
class SearchedTrace:
    """The trace of a replica, and the batches for which its losses are computed.

    Attributes:
        trace: the trace.
        replicas: the number of replicas that compute the global batch.
        micro_batches: the number of micro-batches.
        batches: return batches of a replica, like the tensors of the trace, and their masks. They may
            have more rows, and all but the first may fail.
        allow_unkeyed: whether numbers may be drawn for the place of a row in its replica.
        first: the id of a tensor of the trace -> its value in the first step.
        number: the number of the replica.
        is_alone: whether the trace is that of one replica, whatever the number of replicas of the step.
        again: the checks that are repeated for batches of later steps.
        suspects: what a comparison with one replica tests.
        state: the variables that the step may assign; None for those that no update reads.
        causes: the number of a variable in `state` -> what is wrong if its values differ.
        held: the variables of `state`, and those of metrics, which are not compared.
        parts: the number of micro-batches in which one replica computes the global batch.
    """

    trace: Trace
    replicas: int
    micro_batches: int
    batches: Sequence[ReadBatch]
    allow_unkeyed: bool
    first: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    is_alone: bool = False
    again: list[Check] = dataclasses.field(default_factory=list)
    suspects: list[Suspect] = dataclasses.field(default_factory=list)
    state: Sequence[tf.Variable | None] = ()
    causes: dict[int, Suspect] = dataclasses.field(default_factory=dict)
    held: Sequence[tf.Variable] = ()
    parts: int = 1

    @property
    def is_split(self) -> bool:
        """Whether several replicas or micro-batches compute the global batch."""
        return self.replicas * self.micro_batches > 1

    def read(
        self, batch: ReadBatch, *, is_first: bool = True
    ) -> tuple[list[tf.Tensor], list[bool]]:
        """Returns the values of a batch for the trace, and which of them are labels.

        Args:
            batch: returns it.
            is_first: whether to make rows up if there is no batch.
        """
        size = symbolic(self.trace.inputs)[0].shape[0]
        return read_values(self.trace, batch, size, least=2, is_first=is_first)

    def examine(
        self, finds: Callable[[Sequence[ReadBatch]], bool | str | Suspect], place: str, use: str,
        fix: str, *, warns: bool = False,
    ) -> None:  # fmt: skip
        """Rejects code if a check finds something in the batches; it is repeated for later ones.

        Args:
            finds: the check; it may describe what it has found, or return it.
            place: the user's line, or function.
            use: what it does, as the end of a sentence about it.
            fix: what to do.
            warns: whether to print a line if the check cannot tell.
        """

        def check(batches: Sequence[ReadBatch]) -> None:
            nonlocal warns
            found: bool | str | Suspect = False
            try:
                with tf.init_scope():
                    found = finds(batches)
            except (ProbeError, *FAILURES) as error:
                if warns:
                    _LOG.warning(
                        "%s perhaps %s, which is not known (%s: %s): `ctl check` measures whether the "
                        "update depends on how the batch is split.",
                        place, use, type(error).__name__, " ".join(str(error).split())[:_SHOWN],
                    )  # fmt: skip
            warns = False
            if isinstance(found, Suspect):
                reject(found.place, found.use, found.fix, split=self.is_split)
            elif found:
                what = f"{use}{found}" if isinstance(found, str) else use
                reject(place, what, fix, split=self.is_split)

        check(self.batches)
        self.again.append(check)


def reject(place: str, use: str, fix: str, *, split: bool) -> None:
    """Raises a UsageError, or warns if the batch is not split."""
    line = f"{place} {use}, so the update depends on how the batch is split: {fix}, {ACCEPT}."
    reject_if_split(line, split=split)


def reject_if_split(line: str, *, split: bool) -> None:
    """Raises a UsageError with a line; if the batch is not split, warns of it."""
    if split:
        raise UsageError(line)
    # All rows are those of one replica: the update is right, until the config splits the batch.
    _warn(line)


@functools.cache
def _warn(line: str) -> None:  # several trainers of a process, as of ctl check, have the same loss
    _LOG.warning("%s As long as one replica computes the batch at once, there is no split.", line)
