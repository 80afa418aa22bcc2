"""Saves variables at one point of a step, and restores them if the update is skipped."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs.assignments import Assignment, find_assignments, read_handles


class Assignable(NamedTuple):
    """The variables that the code of a step may assign.

    Attributes:
        once: variables that are assigned once per update, however many micro-batches there are.
        summed: variables to which every micro-batch adds its rows: of metrics, and moving statistics.
        statistics: in `summed`, the moving statistics of unsynchronized batch normalizations.
    """

    once: Sequence[tf.Variable] = ()
    summed: Sequence[tf.Variable] = ()
    statistics: Sequence[tf.Variable] = ()


class Snapshot:
    """The values of variables on one replica.

        snapshot = Snapshot(variables)          # in a replica context
        snapshot.restore_unless(applied)        # after the code that may assign them

    Every replica reads and restores its own copy, without communication. Only the variables that are
    assigned in between are restored, so the values of the others need not be kept.

    Args:
        variables: variables that code of the step may assign.
    """

    def __init__(self, variables: Sequence[tf.Variable]):
        # In eager execution it is not known what is assigned, so everything is restored.
        self._graph: Any = None
        if not tf.executing_eagerly():
            self._graph = tf.compat.v1.get_default_graph()
        self._start = len(self._graph.get_operations()) if self._graph else 0
        # In a replica context, `handle` belongs to the replica's own copy.
        self._copies = {id(v.handle): _SavedCopy.of(v) for v in variables}

    def restore_unless(self, applied: tf.Tensor) -> None:
        """Assigns the old values if the update was skipped.

        Args:
            applied: scalar bool, the same on every replica.
        """
        for copy in self._assigned_copies():
            copy.assign(tf.where(applied, copy.read(), copy.value))

    def select(self, applied: tf.Tensor) -> None:
        """Assigns the old values of all variables, also those of an optimizer, as `restore_unless`."""
        for copy in self._copies.values():
            copy.assign(tf.where(applied, copy.read(), copy.value))

    def restore(self) -> None:
        """Assigns the old values."""
        for copy in self._assigned_copies():
            copy.assign(copy.value)

    def check_assignments(
        self,
        rows: Iterable[Any],
        reason: str,
        sums: Sequence[tf.Variable],
        losses: Iterable[tf.Tensor],
    ) -> None:
        """Checks that every micro-batch assigns the same values.

        Args:
            rows: the tensors that differ between micro-batches.
            reason: why a micro-batch cannot read the others, as the end of a message.
            sums: variables to which every micro-batch adds.
            losses: the losses of a micro-batch.

        Raises:
            UsageError: a value depends on the rows, the losses read a sum over the micro-batches so
                far.
        """
        rows = list(rows)
        read = handles(sums) & read_handles(*losses)
        for assignment in self._assignments():
            copy = self._copies.get(id(assignment.handle))
            if id(assignment.handle) in read:
                raise UsageError(
                    f"{assignment.place} adds to a sum that the loss of the next micro-batch reads, "
                    f"{reason}"
                )
            if copy is not None and assignment.depends_on(rows):
                raise UsageError(
                    f"{assignment.place} assigns {copy.variable.name} a value that depends on the rows "
                    f"of the batch, {reason}"
                )

    def assigned(self) -> dict[int, str]:
        """Returns the names of the variables that were assigned, by their ids."""
        return {id(copy.variable): copy.variable.name for copy in self._assigned_copies()}

    def places_of_others(self, variables: Iterable[tf.Variable]) -> list[str]:
        """Returns the user's lines of code that have assigned other variables than these."""
        known = handles(variables)
        others = (a.place for a in self._assignments() if id(a.handle) not in known)
        return list(dict.fromkeys(others))

    def _assigned_copies(self) -> list["_SavedCopy"]:
        if self._graph is None:
            return list(self._copies.values())
        handles = dict.fromkeys(id(assignment.handle) for assignment in self._assignments())
        return [self._copies[handle] for handle in handles if handle in self._copies]

    def _assignments(self) -> list[Assignment]:
        if self._graph is None:
            return []
        return list(find_assignments(self._graph.get_operations()[self._start :]))


def handles(variables: Iterable[tf.Variable]) -> set[int]:
    """Returns the ids of the handles of variables, of all replicas of this process."""
    # On all replicas, because their code is traced in turn whenever they communicate.
    return {id(part.handle) for v in variables for part in getattr(v, "values", (v,))}


class _SavedCopy(NamedTuple):
    """One replica's copy of a variable, and the value that was read."""

    variable: tf.Variable
    value: tf.Tensor

    @classmethod
    def of(cls, variable: tf.Variable) -> "_SavedCopy":
        # By the raw op, because a variable of mixed precision would be read in 16 bits.
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        return cls(variable, read)

    def read(self) -> tf.Tensor:
        return _SavedCopy.of(self.variable).value

    def assign(self, value: tf.Tensor) -> None:
        variable = self.variable
        context = tf.distribute.get_replica_context()
        is_own = isinstance(variable, tf.distribute.DistributedValues)
        if is_own or context is None or context.num_replicas_in_sync == 1:
            # Not `variable.assign`, with which tf.distribute would reduce over the replicas.
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
        else:  # one variable for all replicas
            variable.assign(value)
