"""Records in the graph the steps that were not finite; the host reads them after an inner loop."""

from collections.abc import Sequence
import dataclasses

import tensorflow as tf

LOSS = "the loss"
SPIKE = "a spike of the loss"


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
        flags: [names] bool, whether each named quantity is acceptable.
        names: the loss, the spike check if there is one, and the variables.
    """

    should_apply: tf.Tensor
    finite: tf.Tensor
    flags: tf.Tensor
    names: list[str]


class NonFiniteRecorder:
    """Records steps that are not finite in variables.

        recorder = NonFiniteRecorder()                              # in the strategy's scope
        position = recorder.add_names([LOSS, "kernel:0"])           # while the step is traced
        recorder.record(step, position, flags, counts=True)         # in a cross-replica context
        recorder.take()                                             # on the host

    Create it in the strategy's scope.
    """

    def __init__(self) -> None:
        self._step = counter("first_non_finite_step", -1)
        self._tensor = counter("first_non_finite_tensor")
        self._count = counter("non_finite_steps")
        # Graphs hold only numbers, so the names of all calls stay on the host, in one list.
        self._names: list[str] = []

    def add_names(self, names: Sequence[str]) -> int:
        """Registers the names of the flags of one call of `record`; returns their position."""
        self._names += names
        return len(self._names) - len(names)

    def record(
        self, step: tf.Tensor, position: int, flags: tf.Tensor, *, counts: tf.Tensor
    ) -> None:
        """Records a step; call it in a cross-replica context.

        Args:
            step: scalar int64, the global step.
            position: the result of `add_names`.
            flags: [names] bool, whether each quantity is acceptable.
            counts: scalar bool, whether to record the step at all.
        """
        # tf.where and not tf.cond, which would nest in the conditional that decides about the update.
        is_first = tf.logical_and(counts, tf.equal(self._count.read_value(), 0))
        # The first False, since the kernels of argmin return the first of equal minima.
        tensor = position + tf.argmin(tf.cast(flags, tf.int32), output_type=tf.int64)
        self._step.assign(tf.where(is_first, step, self._step.read_value()))
        self._tensor.assign(tf.where(is_first, tensor, self._tensor.read_value()))
        self._count.assign_add(tf.cast(counts, tf.int64))

    def take(self) -> NonFiniteReport | None:
        """Returns the report of the steps since the last call; None if all of them were finite."""
        # One transfer from the device if all steps were finite.
        count = int(self._count.numpy())
        if not count:
            return None
        name = self._names[int(self._tensor.numpy())]
        report = NonFiniteReport(int(self._step.numpy()), name, count)
        self._count.assign(0)
        return report


def counter(name: str, value: int = 0) -> tf.Variable:
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
        self._count = tf.Variable(
            0, dtype=tf.int64, trainable=False, name="losses_seen", aggregation=first
        )

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
