"""The parts of users: `ctl.Part`, and `transform_gradients` as the form of one method."""

from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf
import tf_keras

from ctl.data.autograph import convert
from ctl.errors import UsageError, type_name
from ctl.update.gradients import Gradient, nonzero_rows
from ctl.update.part import GlobalUpdate, Part
from ctl.update.plan import Plan

Transform = Callable[[list[Gradient], list[tf.Variable]], Sequence[Gradient]]


def open_own(parts: Sequence[Part], transform: Callable[[], Transform] | None) -> list[Part]:
    """Returns the parts of a user as the step calls them.

    Args:
        parts: as for `part.open_parts`.
        transform: the same. It is called after the parts.

    Raises:
        UsageError: one of the parts is no `ctl.Part`, or is already in a step.
    """
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if not isinstance(part, Part) or part is parts:
            raise UsageError(
                f"build_parts, or parts of ctl.Step, is or has {type_name(part)}: give a list of "
                "objects of subclasses of ctl.Part."
            )
        if getattr(part, "_ctl_is_used", False) or sum(each is part for each in parts) > 1:
            raise UsageError(
                f"{type(part).__name__} is a part of another step, or twice in one: make a new object "
                "for each."
            )
    own = [*parts, *([Transformation(transform)] if transform else ())]
    return [RowsOfSparse(), *own, Checked(own)]


class Transformation(Part):
    """Calls `transform_gradients`, which is read in each trace.

    Args:
        read: returns the function.
    """

    name = "transform_gradients"

    def __init__(self, read: Callable[[], Transform]):
        self._read = read

    def before(self, update: GlobalUpdate) -> None:
        """Replaces the gradients by what the user returns."""
        new = convert(self._read())([*update.gradients], [*update.variables])
        if not isinstance(new, list | tuple):
            raise UsageError(
                f"transform_gradients returned {type_name(new)}, but must return a list of gradients."
            )
        update.gradients = [*new]


class RowsOfSparse(Part):
    """Gives the parts after it one form of a sparse gradient: its rows that are not zero, in order.

    The rows that a sparse gradient has, and their order, depend on the split, because of padding. An
    option may have made it dense.
    """

    def before(self, update: GlobalUpdate) -> None:
        """Replaces the gradients of sparse variables."""
        update.gradients = [
            nonzero_rows(gradient) if update.is_sparse(variable) else gradient
            for gradient, variable in zip(update.gradients, update.variables, strict=True)
        ]


class Checked(Part):
    """Checks what the parts before it have made of the gradients, and describes them.

    Args:
        parts: those parts.
    """

    def __init__(self, parts: Sequence[Part]):
        self._names = ", ".join(part.name or type(part).__name__ for part in parts)
        self._parts = parts
        self._is_traced = False

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Reads which option makes sparse gradients dense."""
        for part in self._parts:
            part._ctl_is_used = True  # type: ignore[attr-defined]
        self._is_dense = bool(plan.options.logical_shards)

    def before(self, update: GlobalUpdate) -> None:
        """Checks the gradients, and makes dense what an option had made dense."""
        self._is_traced = True
        if len(update.gradients) != len(update.variables):
            raise UsageError(
                f"{self._names} left {len(update.gradients)} gradients for {len(update.variables)} "
                "variables: return one for each, which may be None."
            )
        update.gradients = [
            self._check(gradient, variable, update.is_sparse(variable))
            for gradient, variable in zip(update.gradients, update.variables, strict=True)
        ]

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Raises UsageError if the step has no update."""
        if not self._is_traced:
            raise UsageError(
                f"{self._names} has no effect, because the step never calls self.minimize: remove it."
            )

    def describe(self, models: Collection[tf_keras.Model], replicas: int) -> dict[str, str]:
        """Names the parts."""
        return {"parts": f"The updates have parts of your own: {self._names}."}

    def _check(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, is_sparse: bool
    ) -> Gradient:
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        shape = gradient.shape
        if gradient.dtype != variable.dtype or not shape.is_compatible_with(variable.shape):
            raise UsageError(
                f"{self._names} left a gradient of {gradient.dtype.name} {shape} for {variable.name} of "
                f"{variable.dtype.name} {variable.shape}: return one of its dtype and shape."
            )
        return tf.convert_to_tensor(gradient) if is_sparse and self._is_dense else gradient
