"""Gradients that are sent in 16 bits, with the rounding errors added to the next gradients."""

from collections.abc import Collection, Iterable, Sequence
import dataclasses
import functools
import logging
import math

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.replica.arithmetic import gradients as gradients_module
from ctl.replica.arithmetic import waits
from ctl.replica.arithmetic.gradients import Gradient
from ctl.replica.arithmetic.reduction import sum_over_replicas
from ctl.replica.arithmetic.variables import variables_of
from ctl.replica.updates.replica_values import ReplicaValues

_LOG = logging.getLogger("ctl")
# The largest absolute value of a sum over all replicas. It is a power of two, so that the bound of each
# replica, this number divided by a power of two, is exact in float16, and a sum of contributions at the
# bound is not rounded up to infinity.
_LARGEST = {tf.float16: 2.0**15, tf.bfloat16: 2.0**126}


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The result of a reduction on one replica.

    Attributes:
        gradients: the gradients of the global batch, unscaled, the same on every replica.
        loss: the loss of the global batch.
        changes: pairs of a variable of the state and its new value, which `Compression.keep` assigns.
    """

    gradients: list[Gradient]
    loss: tf.Tensor
    changes: list[tuple[tf.Variable, tf.Tensor]]


class Compression:
    """Sends and sums gradients in float16 or bfloat16, with error feedback.

        compression = Compression(options, strategy)                     # in the scope
        compression.add_models([model])
        reduced = compression.reduce(gradients, loss, variables, loss_scale=None)   # in a replica
        compression.keep(reduced, applied)

    The rounding error of a replica's contribution is added to its next contribution (Seide et al. 2014,
    "1-bit stochastic gradient descent"). The rounding error of the sums over the replicas is lost,
    because no replica can compute it. See docs/step.md, section 16.

    Args:
        options: the trainer's options.
        strategy: the strategy of the models.

    Attributes:
        name: the dtype in which gradients are sent.
        state: holds the errors, for a checkpoint.
    """

    def __init__(self, options: TrainerOptions, strategy: tf.distribute.Strategy):
        self.name = options.compression
        self._dtype = tf.as_dtype(self.name)
        self._strategy = strategy
        self._errors: dict[int, ReplicaValues] = {}  # by the id of the variable
        self._reported: set[str] = set()
        self.state = tf.Module()
        self.state.errors = []

    def add_models(self, models: Iterable[tf_keras.Model]) -> None:
        """Adds the variables of models, including those of layers that are frozen now.

        Args:
            models: models; those that are not built are skipped, because they have no variables yet.
        """
        with self._strategy.scope():
            for variable in self._find_missing(models):
                name = f"error/{variable.name.partition(':')[0]}"
                self._errors[id(variable)] = ReplicaValues(variable, name, self._strategy)
                self.state.errors.append(self._errors[id(variable)])

    def check_complete(self, models: Iterable[tf_keras.Model]) -> None:
        """Raises UsageError if a model was built after `add_models`, for example in the first step."""
        missing = self._find_missing(models)
        if missing:
            raise UsageError(
                f"runtime.all_reduce.compression cannot compress the gradient of {missing[0].name}, "
                "which the step created: build every model in the constructor, such as by "
                "self.discriminator.build(input_shape)."
            )

    def count_bytes(self, models: Iterable[tf_keras.Model]) -> tuple[int, int]:
        """Counts the bytes of the gradients of one replica in one step, assuming that none is sparse.

        Args:
            models: models; those that are not built are skipped.

        Returns:
            The bytes of the gradients, and the bytes that are sent in their place.
        """
        variables = {id(v): v for m in models if m.built for v in m.trainable_variables}.values()
        counts = [math.prod(v.shape) for v in variables]
        plain = sum(n * v.dtype.size for n, v in zip(counts, variables, strict=True))
        return plain, sum(counts) * self._dtype.size

    def describe(self, models: Iterable[tf_keras.Model]) -> str:
        """Describes for the user the bytes that one replica sends in one step.

        Args:
            models: models; those that are not built are skipped.
        """
        plain, sent = (size / 2**20 for size in self.count_bytes(models))
        return f"{self.name}: {sent:.2f} MiB in place of {plain:.2f} MiB"

    def reduce(
        self,
        gradients: Sequence[Gradient],
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        *,
        loss_scale: tf.Tensor | None,
    ) -> Reduced:
        """Sums gradients and loss over the replicas; call it in a replica context, on every replica.

        Sparse gradients, and those of variables that are not compressed, are summed as they are.

        Args:
            gradients: this replica's gradients; None for the same variables on every replica.
            loss: this replica's share of the loss, not scaled.
            variables: the variables of the gradients.
            loss_scale: the scale of the gradients, a scalar; None if they are not scaled.

        Returns:
            The sums, and the new errors, which are not assigned yet.
        """
        # Unscale before rounding: the errors must not be scaled, because the scale changes.
        if loss_scale is not None:
            gradients = gradients_module.unscale(gradients, loss_scale)
        sent, changes = list(gradients), []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            error = self._errors.get(id(variable))
            if error is not None and self._is_dense(gradient, variable):
                value = gradient + error.local
                sent[i] = self._round(value)
                changes.append((error.local, value - tf.cast(sent[i], value.dtype)))
        places = [i for i, gradient in enumerate(sent) if gradient is not None]
        *sums, loss = _sum([*(sent[i] for i in places), loss])
        reduced: list[Gradient] = [None] * len(sent)
        for i, total in zip(places, sums, strict=True):
            cast = functools.partial(tf.cast, dtype=gradients[i].dtype)
            reduced[i] = gradients_module.map_values(total, cast)
        return Reduced(reduced, loss, changes)

    def keep(self, reduced: Reduced, applied: tf.Tensor | bool) -> None:
        """Keeps errors for the next step, unless this step was skipped.

        Args:
            reduced: the result of `reduce`.
            applied: scalar bool, the same on every replica; True if a step is never skipped.
        """
        for variable, value in reduced.changes:
            old = tf.convert_to_tensor(variable)
            variable.assign(value if applied is True else tf.where(applied, value, old))

    def reset(self, *, keep: Collection[int] = ()) -> None:
        """Sets errors to zero, as after restoring weights alone.

        Args:
            keep: ids (`id(x)`) of the `ReplicaValues` that keep their values.
        """
        with self._strategy.scope():
            for error in self.state.errors:
                if id(error) not in keep:
                    error.assign(tf.zeros([1, *error.shape[1:]], error.dtype))

    def local_variables(self) -> list[tf.Variable]:
        """Returns the variables of one replica: its errors."""
        return [error.local for error in self.state.errors]

    def _find_missing(self, models: Iterable[tf_keras.Model]) -> list[tf.Variable]:
        """Returns the variables of built models that can be compressed and have no error yet.

        Their order does not depend on which layers are frozen, unlike the order of `model.variables`. A
        checkpoint identifies the errors by their position in this order.
        """
        built = [model for model in models if model.built]
        layers = [layer for model in built for layer in model._flatten_layers()]
        variables = [v for layer in layers for v in layer._trainable_weights]
        variables += [v for model in built for v in variables_of(model)]  # includes other modules
        return [
            v
            for v in {id(v): v for v in variables if v.trainable}.values()
            if id(v) not in self._errors and v.dtype.is_floating
        ]

    def _is_dense(self, gradient: Gradient, variable: tf.Variable) -> bool:
        if isinstance(gradient, tf.IndexedSlices) and variable.name not in self._reported:
            self._reported.add(variable.name)
            _LOG.warning(
                "The gradient of %s is sparse, so runtime.all_reduce.compression does not compress it.",
                variable.name,
            )
        return gradient is not None and not isinstance(gradient, tf.IndexedSlices)

    def _round(self, value: tf.Tensor) -> tf.Tensor:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # If an element could overflow in the sum, a part of it is sent now, and the rest in later steps.
        # Infinity and NaN are sent unchanged, so that the step detects them.
        bound = _LARGEST[self._dtype] / 2 ** math.ceil(math.log2(replicas))
        clipped = tf.clip_by_value(value, -bound, bound)
        return tf.cast(tf.where(tf.math.is_finite(value), clipped, value), self._dtype)


def _sum(values: Sequence[Gradient]) -> list[Gradient]:
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return list(values)
    # The sums are not differentiated; see `reduction.all_reduce`.
    sums = sum_over_replicas([gradients_module.map_values(v, tf.stop_gradient) for v in values])
    waits.observe(values, sums)
    return sums
