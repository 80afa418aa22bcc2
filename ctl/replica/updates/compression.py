"""The reduction of compressed gradients, and the state that it keeps between steps."""

from collections.abc import Collection, Iterable, Iterator, Sequence
import dataclasses
import logging
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.replica.arithmetic import gradients as gradients_module
from ctl.replica.arithmetic import waits
from ctl.replica.arithmetic.gradients import Gradient
from ctl.replica.arithmetic.reduction import sum_over_replicas
from ctl.replica.updates.compression_methods import PowerSgd, SixteenBit
from ctl.replica.updates.replica_values import ReplicaValues

_LOG = logging.getLogger("ctl")


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The state of one compressed variable between steps.

    Attributes:
        error: for each replica, the part of its contributions that was not sent yet.
        factor: PowerSGD's factor Q, [m, rank]; None for methods without a factor.
    """

    error: ReplicaValues
    factor: tf.Variable | None


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The result of a reduction on one replica.

    Attributes:
        gradients: the compressed gradients of the global batch, unscaled, the same on every replica.
        loss: the loss of the global batch.
        changes: pairs of a variable of the state and its new value, which `Compression.keep` assigns.
    """

    gradients: list[Gradient]
    loss: tf.Tensor
    changes: list[tuple[tf.Variable, tf.Tensor]]


class Compression:
    """Sums gradients over the replicas in fewer bytes; the rest is added to the next gradients.

        compression = Compression(options, strategy)                     # in the scope
        compression.add_models([model])
        reduced = compression.reduce(gradients, loss, variables, loss_scale=None)   # in a replica
        compression.keep(reduced, applied)

    See docs/step.md, section 16. `add_models` adds the variables to compress.

    Args:
        options: the trainer's options.
        strategy: the strategy of the models.

    Attributes:
        name: the method, such as "powersgd of rank 2".
        state: holds the errors and the factors, for a checkpoint.
        is_active: whether the current steps are compressed. A step is traced once for each value.
    """

    def __init__(self, options: TrainerOptions, strategy: tf.distribute.Strategy):
        name = options.compression
        self._method: Any = (
            PowerSgd(options.compression_rank, seed=options.seed)
            if name == "powersgd"
            else SixteenBit(tf.as_dtype(name))
        )
        self.name = f"powersgd of rank {options.compression_rank}" if name == "powersgd" else name
        self._start = options.compression_start
        self._strategy = strategy
        self._kept: dict[int, _Kept] = {}
        self._reported: set[str] = set()
        self.is_active = not self._start
        self.state = tf.Module()
        self.state.errors, self.state.factors = [], []

    def add_models(self, models: Iterable[tf_keras.Model]) -> None:
        """Adds the variables of models, including those of layers that are frozen now.

        Args:
            models: models; those that are not built are skipped, because they have no variables yet.
        """
        with self._strategy.scope():
            for variable in self._find_missing(models):
                self._kept[id(variable)] = self._create(variable)

    def check_complete(self, models: Iterable[tf_keras.Model]) -> None:
        """Raises UsageError if a model was built after `add_models`, for example in the first step."""
        missing = self._find_missing(models)
        if missing:
            raise UsageError(
                f"runtime.all_reduce.compression cannot compress the gradient of {missing[0].name}, "
                "which the step created: build every model in the constructor, such as by "
                "self.discriminator.build(input_shape)."
            )

    def check_effect(self) -> None:
        """Raises UsageError if no variable is compressed."""
        if not self._kept:
            raise UsageError(
                f"runtime.all_reduce.compression: {self.name} compresses no variable, because factors "
                "would not be smaller than the gradients: choose a smaller runtime.all_reduce.rank."
            )

    def count_bytes(self, models: Iterable[tf_keras.Model]) -> tuple[int, int]:
        """Counts the bytes of the gradients of one replica in one step, assuming that none is sparse.

        Args:
            models: models; those that are not built are skipped.

        Returns:
            The bytes of the gradients, and the bytes that are sent in their place.
        """
        variables = {id(v): v for m in models if m.built for v in m.trainable_variables}.values()
        plain = [v.shape.num_elements() * v.dtype.size for v in variables]
        sent = [
            self._method.sent_bytes(v.shape, v.dtype) if id(v) in self._kept else size
            for v, size in zip(variables, plain, strict=True)
        ]
        return sum(plain), sum(sent)

    def describe(self, models: Iterable[tf_keras.Model]) -> str:
        """Describes for the user the bytes that one replica sends in one step.

        Args:
            models: models; those that are not built are skipped.
        """
        plain, sent = (size / 2**20 for size in self.count_bytes(models))
        start = f" from step {self._start} on" if self._start else ""
        return f"{self.name}{start}: {sent:.2f} MiB in place of {plain:.2f} MiB"

    def split(self, first: int, count: int) -> Iterator[int]:
        """Splits steps at the first one that is compressed.

        Args:
            first: the first step.
            count: the number of steps.

        Yields:
            The number of steps of each part, after `is_active` has been set for that part.
        """
        ends = [self._start] if first < self._start < first + count else []
        for end in (*ends, first + count):
            self.is_active = first >= self._start
            yield end - first
            first = end

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
            The sums, and the new errors and factors, which are not assigned yet.
        """
        # Unscale before compressing: the errors must not be scaled, because the scale changes.
        if loss_scale is not None:
            gradients = gradients_module.unscale(gradients, loss_scale)
        places = [
            i
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if id(variable) in self._kept and self._is_dense(gradient, variable)
        ]
        kept = [self._kept[id(variables[i])] for i in places]
        values = [gradients[i] + k.error.local for i, k in zip(places, kept, strict=True)]
        factors = [k.factor for k in kept if k.factor is not None]
        plain = [i for i, g in enumerate(gradients) if g is not None and i not in places]
        updates, errors, new_factors, others = self._method.reduce(
            values,
            [tf.convert_to_tensor(factor) for factor in factors],
            [*(gradients[i] for i in plain), loss],
            _sum,
        )
        reduced = list(gradients)
        for i, value in zip((*places, *plain), (*updates, *others[:-1]), strict=True):
            reduced[i] = value
        changes = [(k.error.local, error) for k, error in zip(kept, errors, strict=True)]
        changes += zip(factors, new_factors, strict=True)
        return Reduced(reduced, others[-1], changes)

    def keep(self, reduced: Reduced, applied: tf.Tensor | bool) -> None:
        """Keeps errors and factors for the next step, unless this step was skipped.

        Args:
            reduced: the result of `reduce`.
            applied: scalar bool, the same on every replica; True if a step is never skipped.
        """
        for variable, value in reduced.changes:
            old = tf.convert_to_tensor(variable)
            variable.assign(value if applied is True else tf.where(applied, value, old))

    def reset(self, *, keep: Collection[int] = ()) -> None:
        """Sets errors to zero and factors to their first values, as after restoring weights alone.

        Args:
            keep: ids (`id(x)`) of the `ReplicaValues` and factors that keep their values.
        """
        with self._strategy.scope():
            for index, kept in enumerate(self._kept.values()):
                shape = kept.error.shape[1:]
                if id(kept.error) not in keep:
                    kept.error.assign(tf.zeros([1, *shape], kept.error.dtype))
                if kept.factor is not None and id(kept.factor) not in keep:
                    kept.factor.assign(self._method.initial_factor(shape, index))

    def local_variables(self) -> list[tf.Variable]:
        """Returns the variables of one replica: its errors, and the factors."""
        return [*(error.local for error in self.state.errors), *self.state.factors]

    def _find_missing(self, models: Iterable[tf_keras.Model]) -> list[tf.Variable]:
        """Returns the variables of built models that can be compressed and have no error yet.

        Their order does not depend on which layers are frozen, unlike the order of `model.variables`. A
        checkpoint identifies the errors by their position in this order.
        """
        built = [model for model in models if model.built]
        layers = [layer for model in built for layer in model._flatten_layers()]
        variables = [v for layer in layers for v in layer._trainable_weights]
        variables += [v for model in built for v in model.variables]  # includes other modules
        return [
            v
            for v in {id(v): v for v in variables if v.trainable}.values()
            if id(v) not in self._kept and self._method.applies(v.shape)
        ]

    def _create(self, variable: tf.Variable) -> _Kept:
        name = variable.name.partition(":")[0]
        error = ReplicaValues(variable, f"error/{name}", self._strategy)
        first = self._method.initial_factor(variable.shape, len(self._kept))
        self.state.errors.append(error)
        if first is None:
            return _Kept(error, None)
        # Each replica computes the same value: a local assignment is enough, and the first one is saved.
        factor = tf.Variable(
            tf.constant(first, error.dtype),
            trainable=False,
            name=f"factor/{name}",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self.state.factors.append(factor)
        return _Kept(error, factor)

    def _is_dense(self, gradient: Gradient, variable: tf.Variable) -> bool:
        if isinstance(gradient, tf.IndexedSlices) and variable.name not in self._reported:
            self._reported.add(variable.name)
            _LOG.warning(
                "The gradient of %s is sparse, so runtime.all_reduce.compression does not compress it.",
                variable.name,
            )
        return gradient is not None and not isinstance(gradient, tf.IndexedSlices)


def _sum(values: Sequence[Gradient]) -> list[Gradient]:
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return list(values)
    # The sums are not differentiated; see `reduction.all_reduce`.
    sums = sum_over_replicas([gradients_module.map_values(v, tf.stop_gradient) for v in values])
    waits.observe(values, sums)
    return sums
