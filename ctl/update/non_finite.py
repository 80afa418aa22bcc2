"""Records in the graph the steps that were not finite; the host reads them after an inner loop."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import tensorflow as tf

LOSS = "the loss"
SPIKE = "a spike of the loss"
_NONE = (-1, 0, 0)


@dataclasses.dataclass(frozen=True)
class NonFiniteReport:
    """The steps of an inner loop that were not finite, or whose loss was a spike.

    Attributes:
        step: the global step of the first one.
        tensor: its first offending quantity: "the loss", "a spike of the loss", or the name of the
            variable whose gradient is not finite.
        count: the number of such steps.
    """

    step: int
    tensor: str
    count: int

    def __str__(self) -> str:
        if self.tensor == SPIKE:
            return f"has {SPIKE}, far above the running median"
        quantity = LOSS if self.tensor == LOSS else f"the gradient of {self.tensor}"
        return f"is not finite: {quantity} is first"


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether to apply an update. Computed from reduced values, so all replicas agree.

    Attributes:
        should_apply: scalar bool.
        finite: scalar bool, whether the loss and all gradients are finite.
        first: scalar int64, the position of the first name that is not acceptable.
        names: the loss, the spike check if there is one, and the variables.
    """

    should_apply: tf.Tensor
    finite: tf.Tensor
    first: tf.Tensor
    names: list[str]


class NonFiniteRecorder:
    """Records steps that are not finite in variables.

        recorder = NonFiniteRecorder()                              # in the strategy's scope
        position = recorder.add_names([LOSS, "kernel:0"])           # while the step is traced
        recorder.record(step, position + first, counts=True)        # in a cross-replica context
        recorder.take()                                             # on the host

    Create it in the strategy's scope.

    Attributes:
        state: int64 variable, the record.
    """

    def __init__(self) -> None:
        # The first step, the position of its tensor's name, and the number of steps: one variable,
        # because a GPU starts a kernel for each.
        self.state = counter("non_finite_steps", _NONE)
        # Graphs hold only numbers, so the names of all calls stay on the host, in one list.
        self._names: list[str] = []
        self._positions: dict[tuple[str, ...], int] = {}

    def add_names(self, names: Sequence[str]) -> int:
        """Registers the names of a step that is traced; returns the position of the first one."""
        # Once, because every replica traces the step, and all must record the same position.
        position = self._positions.setdefault(tuple(names), len(self._names))
        if position == len(self._names):
            self._names += names
        return position

    def record(self, step: tf.Tensor, tensor: tf.Tensor, *, counts: tf.Tensor) -> None:
        """Records a step; call it as `replicas.merge` calls a function.

        Args:
            step: scalar int64, the global step.
            tensor: scalar int64, the position of the first name that is not acceptable.
            counts: scalar bool, whether to record the step at all.
        """
        # tf.where and not tf.cond, which would nest in the conditional that decides about the update.
        state, count = self.state.read_value(), tf.cast(counts, tf.int64)
        is_first = tf.logical_and(counts, tf.equal(state[2], 0))
        self.state.assign(tf.where(is_first, [step, tensor, 1], tf.add(state, [0, 0, count])))

    def take(self) -> NonFiniteReport | None:
        """Returns the report of the steps since the last call; None if all of them were finite."""
        step, tensor, count = map(int, self.state.numpy())
        if not count:
            return None
        self.state.assign(_NONE)
        return NonFiniteReport(step, self._names[tensor], count)


def counter(name: str, value: Any = 0) -> tf.Variable:
    """Creates an int64 variable that all replicas assign alike; call it in the strategy's scope."""
    # Any copy is right, and a sum would count the replicas.
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, dtype=tf.int64, trainable=False, name=name, aggregation=first)


def first_non_finite_variable(variables: Sequence[tf.Variable]) -> str | None:
    """Returns the name of the first variable with an infinite or NaN element; None if all are finite."""
    for variable in variables:
        if not variable.dtype.real_dtype.is_floating:
            continue
        if not bool(tf.reduce_all(tf.math.is_finite(tf.abs(variable)))):  # also of complex elements
            return variable.name
    return None


WINDOW = 101  # number of losses that the median is computed from; odd, so that it is one of them


class LossSpikes(tf.Module):
    """Keeps the last losses and compares each new one with their median.

        spikes = LossSpikes(3.0, dtype=tf.float32)              # in the strategy's scope
        spike = spikes.is_spike(loss)                           # in a replica context

    The losses are those of global batches, so all replicas agree. They are saved in the checkpoint, so
    the result does not depend on how often the run was restarted. Spikes enter the window too: a loss
    that stays high becomes the median.

    Args:
        factor: the multiple of the median above which a loss is a spike; 0 switches the check off.
        dtype: dtype of the loss.
    """

    def __init__(self, factor: float, *, dtype: tf.DType):
        # The names of this module, its attributes and its variables are part of every checkpoint.
        super().__init__(name="spikes")
        self.factor = factor
        # Every replica assigns the same reduced loss; without an aggregation tf.distribute rejects an
        # assignment in a replica context.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self._losses = tf.Variable(
            tf.zeros([WINDOW], dtype), trainable=False, name="last_losses", aggregation=first
        )
        self._count = counter("losses_seen")

    def is_spike(self, loss: tf.Tensor) -> tf.Tensor:
        """Compares a loss and stores it if it is finite; call it once per step.

        With the median m of the last `WINDOW` losses, a loss above m + (factor - 1) |m| is a spike,
        which is factor times m if m is positive. No loss is a spike before the window is full.

        Args:
            loss: scalar, the loss of the global batch, the same on every replica.

        Returns:
            A scalar bool.
        """
        losses, count = self._losses.read_value(), self._count.read_value()
        loss = tf.cast(loss, losses.dtype)
        finite = tf.math.is_finite(loss)
        median = tf.sort(losses)[WINDOW // 2]
        # The distance from the median, so that the check holds for negative losses too.
        high = loss > median + (self.factor - 1) * tf.abs(median)
        # The window is a ring buffer: the new loss replaces the oldest one.
        oldest = tf.equal(tf.range(WINDOW, dtype=tf.int64), count % WINDOW)
        self._losses.assign(tf.where(tf.logical_and(oldest, finite), loss, losses))
        self._count.assign_add(tf.cast(finite, tf.int64))
        return tf.reduce_all([high, finite, count >= WINDOW])
