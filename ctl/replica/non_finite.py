"""Which step was the first that is to be left out, and for what in it."""

from collections.abc import Sequence
import dataclasses

import tensorflow as tf

LOSS = "the loss"
SPIKE = "a spike of the loss"


@dataclasses.dataclass(frozen=True)
class NonFiniteReport:
    """What was not finite since the last look.

    Attributes:
        step: the global step of the first batch that gave it.
        tensor: what was not finite first: "the loss", or the name of a variable whose gradient; or
            "a spike of the loss".
        count: how many updates were left out.
    """

    step: int
    tensor: str
    count: int

    def __str__(self) -> str:
        if self.tensor == SPIKE:
            return f"has {SPIKE}, far above the running median"
        of = LOSS if self.tensor == LOSS else f"the gradient of {self.tensor}"
        return f"is not finite: {of} is first"


class NonFiniteRecorder:
    """Notes non-finite steps in the graph, for the host to look at when a loop has ended.

    noted = NonFinite()                                     # under the strategy's scope
    position = noted.position([LOSS, "kernel:0"])           # while the step is traced
    noted.note(step, position, flags, serious=True)         # across replicas, in the false branch
    noted.take()                                            # on the host
    """

    def __init__(self) -> None:
        """Makes the variables; call it under the strategy's scope."""
        self._step = self._variable("first_non_finite_step", -1)
        self._tensor = self._variable("first_non_finite_tensor", 0)
        self._count = self._variable("non_finite_steps", 0)
        self._names: list[str] = []

    def position(self, names: Sequence[str]) -> int:
        """Remembers what the flags of a call of `note` stand for; returns where they begin."""
        self._names += names
        return len(self._names) - len(names)

    def note(self, step: tf.Tensor, position: int, flags: tf.Tensor, *, serious: tf.Tensor) -> None:
        """Counts a step that is left out; call it across replicas.

        Args:
            step: its global step, a scalar int64.
            position: what `position` returned.
            flags: [names] bool, whether each of them was as it should be.
            serious: scalar bool, whether it counts.
        """
        first = tf.logical_and(serious, tf.equal(self._count.read_value(), 0))
        tensor = position + tf.argmin(tf.cast(flags, tf.int32), output_type=tf.int64)
        self._step.assign(tf.where(first, step, self._step.read_value()))
        self._tensor.assign(tf.where(first, tensor, self._tensor.read_value()))
        self._count.assign_add(tf.cast(serious, tf.int64))

    def take(self) -> NonFiniteReport | None:
        """What was noted since the last call, or None where all was finite."""
        count = int(self._count.numpy())
        if not count:
            return None
        report = NonFiniteReport(
            int(self._step.numpy()), self._names[int(self._tensor.numpy())], count
        )
        self._count.assign(0)
        return report

    def _variable(self, name: str, value: int) -> tf.Variable:
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return tf.Variable(value, dtype=tf.int64, trainable=False, name=name, aggregation=first)
