"""Gradients that are sent in 16 bits, with the rounding errors added to the next gradients."""

from collections.abc import Collection, Iterable, Mapping, Sequence
import math
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.keras.precision import Optimizer
from ctl.keras.variables import variables_of
from ctl.parts.replica_values import ReplicaValues
from ctl.rows import waits
from ctl.update import gradients as gradients_module
from ctl.update import reduction
from ctl.update.gradients import Gradient
from ctl.update.part import GlobalUpdate, Part
from ctl.update.plan import Plan

# The largest absolute value of a sum over all replicas. It is a power of two, so that the bound of each
# replica, this number divided by a power of two, is exact in float16, and a sum of contributions at the
# bound is not rounded up to infinity.
_LARGEST = {tf.float16: 2.0**15, tf.bfloat16: 2.0**126}


class Compression(Part):
    """Sends and sums gradients in float16 or bfloat16, with error feedback.

        compression = Compression(options)
        compression.create(plan, model)                                             # in the scope
        update = compression.reduce(gradients, loss, variables, loss_scale=None)    # in a replica

    The rounding error of a replica's contribution is added to its next contribution (Seide et al. 2014,
    "1-bit stochastic gradient descent"). The rounding error of the sums over the replicas is lost,
    because no replica can compute it. See docs/step.md, section 16.

    Args:
        options: the trainer's options.

    Attributes:
        errors: for each replica, the part of its contributions that was not sent yet.
    """

    restored = False

    def __init__(self, options: TrainerOptions):
        self.options = options
        self._dtype = tf.as_dtype(options.compression)
        self._errors: dict[int, ReplicaValues] = {}  # by the id of the variable
        self._state = tf.Module()
        self._state.errors = []

    @property
    def errors(self) -> list[ReplicaValues]:
        """The errors, in the order of a checkpoint."""
        return self._state.errors

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Creates the errors of the first model, also those of layers that are frozen now."""
        if plan.own_train_step:
            raise UsageError(
                "runtime.all_reduce.compression reduces the gradients in ctl's own step, but this "
                "trainer overrides train_step: override replica_step, or set "
                'runtime.all_reduce.compression="".'
            )
        self._strategy = tf.distribute.get_strategy()
        self.add_models({"": model})

    def add_models(self, models: Mapping[str, tf_keras.Model]) -> None:
        """Creates the errors of further models."""
        with self._strategy.scope():
            for variable in self._find_missing(models.values()):
                name = f"error/{variable.name.partition(':')[0]}"
                self._errors[id(variable)] = ReplicaValues(variable, name, self._strategy)
                self.errors.append(self._errors[id(variable)])

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Raises UsageError if a model was built after `add_models`, for example in the first step."""
        missing = self._find_missing(models.values())
        if missing:
            raise UsageError(
                f"runtime.all_reduce.compression cannot compress the gradient of {missing[0].name}, "
                "which the step created: build every model in the constructor, such as by "
                "self.discriminator.build(input_shape)."
            )

    def describe(self, models: Collection[tf_keras.Model], replicas: int) -> dict[str, str]:
        """Describes the bytes that one replica sends in one step, and what an update depends on."""
        variables = {id(v): v for m in models if m.built for v in m.trainable_variables}.values()
        plain = sum(math.prod(v.shape) * v.dtype.size for v in variables) / 2**20
        sent = sum(math.prod(v.shape) * self._dtype.size for v in variables) / 2**20
        how = f"{sent:.2f} MiB in place of {plain:.2f} MiB per step and replica"
        if replicas == 1:
            how = "as those of several replicas, but one replica sends nothing"
        text = (
            f"Dense gradients are compressed by {self.options.compression}: {how}. An update is no "
            "longer a function of the global batch alone: it also depends on what earlier steps held "
            "back, and on how the batch is split."
        )
        return {"reduction": text}

    def reduce(
        self, gradients: Sequence[Gradient], loss: tf.Tensor, variables: Sequence[tf.Variable],
        *, loss_scale: tf.Tensor | None, optimizer: Optimizer | None = None,
    ) -> GlobalUpdate:  # fmt: skip
        """Sums gradients and loss over the replicas; call it in a replica context, on every replica.

        Sparse gradients, and those of variables that are not compressed, are summed as they are.

        Args:
            gradients: this replica's gradients; None for the same variables on every replica.
            loss: this replica's share of the loss, not scaled.
            variables: the variables of the gradients.
            loss_scale: the scale of the gradients, a scalar; None if they are not scaled.
            optimizer: is not used.

        Returns:
            The sums, and the new errors, which are not assigned yet.
        """
        # Unscale before rounding: the errors must not be scaled, because the scale changes.
        if loss_scale is not None:
            gradients = gradients_module.unscale(gradients, loss_scale)
        sent, changes = list(gradients), []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            error = self._errors.get(id(variable))
            if isinstance(gradient, tf.Tensor) and error is not None:
                value = gradient + error.local
                sent[i] = self._round(value)
                changes.append((error.local, value - tf.cast(sent[i], value.dtype)))
        sums, total = reduction.all_reduce(sent, loss)
        waits.observe((sent, loss), (sums, total))
        pairs = zip(sums, gradients, strict=True)
        sums = [value if like is None else tf.cast(value, like.dtype) for value, like in pairs]
        return GlobalUpdate(variables, sums, total, changes)

    def after(self, update: GlobalUpdate, before: Any, applied: tf.Tensor | bool) -> None:
        """Keeps the errors for the next step, unless this step was skipped."""
        for variable, value in update.changes:
            old = tf.convert_to_tensor(variable)
            variable.assign(value if applied is True else tf.where(applied, value, old))

    def state(self) -> dict[str, Any]:
        """Returns the errors."""
        return {"compression": self._state}

    def restart(self, *, keep: Collection[int] = ()) -> None:
        """Sets errors to zero, as after restoring weights alone."""
        with self._strategy.scope():
            for error in self.errors:
                if id(error) not in keep:
                    error.assign(tf.zeros([1, *error.shape[1:]], error.dtype))

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

    def _round(self, value: tf.Tensor) -> tf.Tensor:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # If an element could overflow in the sum, a part of it is sent now, and the rest in later steps.
        # Infinity and NaN are sent unchanged, so that the step detects them.
        bound = _LARGEST[self._dtype] / 2 ** math.ceil(math.log2(replicas))
        clipped = tf.clip_by_value(value, -bound, bound)
        return tf.cast(tf.where(tf.math.is_finite(value), clipped, value), self._dtype)
