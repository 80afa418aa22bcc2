"""The reduction of compressed gradients, and the state that it keeps between steps."""

from collections.abc import Callable, Collection, Iterable, Sequence
import dataclasses
import functools
import logging
import math
from typing import Any

import numpy as np
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

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]

# Elements of a block, which one thread sums. TensorFlow divides longer sums among its threads.
_BLOCK = 1024
# The largest absolute value of a sum over all replicas. It is a power of two, so that the bound of each
# replica, this number divided by a power of two, is exact in float16, and a sum of contributions at the
# bound is not rounded up to infinity.
_LARGEST = {tf.float16: 2.0**15, tf.bfloat16: 2.0**126}


class PowerSgd:
    """Reduces matrices over the replicas by their products with a few directions (PowerSGD).

    The method is of Vogels et al. 2019, arXiv:1905.13727. A gradient is treated as a matrix M =
    sum_r M_r over the replicas r. One step of subspace iteration, which begins with the factor Q of the
    previous step, computes its projection on `rank` directions:

        P = sum_r M_r Q,    P^ = orthonormal columns of P,    Q' = sum_r M_r^T P^,    update = P^ Q'^T

    Only P [n, rank] and Q' [m, rank] are sent. They depend on the sum M alone, not on how it is split.

    Each process computes P^, Q and the update itself from the same sums, so its kernels must give the
    same bits on every CPU and with any number of threads: elementwise ones, and sums of short blocks. A
    matrix product does not, because oneDNN chooses its kernel by the CPU; it is used for a replica's own
    values.

    Args:
        rank: the number of directions.
        seed: determines the first directions, which are the same on every replica.
    """

    def __init__(self, rank: int, *, seed: int):
        self.rank = rank
        self._seed = seed

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Returns the shape of the matrix as which a variable is compressed.

        The first dimensions become the rows and the others the columns, split where n + m is smallest.
        For example, the kernel of a convolution becomes [height * width * inputs, outputs].

        Args:
            shape: the shape of the variable.

        Returns:
            n and m; None if the factors would not be smaller than the matrix.
        """
        sizes = [
            (math.prod(shape[:split]), math.prod(shape[split:])) for split in range(1, len(shape))
        ]
        n, m = min(sizes, key=sum, default=(0, 0))
        return (n, m) if self.rank * (n + m) < n * m else None

    def sent_bytes(self, shape: Sequence[int], dtype: tf.DType) -> int:
        """Returns the bytes that a replica sends for a compressed variable of this shape and dtype."""
        return self.rank * sum(self.matrix_shape(shape) or ()) * dtype.size

    def applies(self, shape: Sequence[int]) -> bool:
        """Returns whether a variable of this shape is compressed."""
        return self.matrix_shape(shape) is not None

    def initial_factor(self, shape: Sequence[int], index: int) -> np.ndarray | None:
        """Returns the first factor Q of a compressed variable.

        Args:
            shape: the shape of the variable.
            index: the number of the variable; variables of the same shape get different directions.

        Returns:
            [m, rank] float64, random columns of norm 1.
        """
        matrix = self.matrix_shape(shape)
        assert matrix
        random = np.random.default_rng([self._seed, index])
        directions: np.ndarray = random.normal(size=[matrix[1], self.rank])
        return directions / np.linalg.norm(directions, axis=0)

    def reduce(
        self,
        values: Sequence[tf.Tensor],
        factors: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor],
        sum_over_replicas: Sum,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Reduces gradients; call it in a replica context, on every replica.

        Args:
            values: this replica's gradients plus its errors of earlier steps, in the variables' shapes.
            factors: the factor Q of each value, [m, rank], the same on every replica.
            others: tensors to sum without compression, in the first all-reduce.
            sum_over_replicas: sums tensors over the replicas.

        Returns:
            The updates, this replica's new errors, the new factors, and the sums of the others.
        """
        shapes = [self.matrix_shape(value.shape) for value in values]
        matrices = [tf.reshape(v, shape) for v, shape in zip(values, shapes, strict=True)]
        products = [tf.matmul(m, q) for m, q in zip(matrices, factors, strict=True)]
        sums = sum_over_replicas([*products, *others])
        products, others = sums[: len(values)], sums[len(values) :]
        bases = [orthonormalize(product) for product in products]
        own = [tf.matmul(m, p, transpose_a=True) for m, (p, _) in zip(matrices, bases, strict=True)]
        totals = sum_over_replicas(own)
        updates, errors, new = [], [], []
        for value, matrix, factor, (basis, valid), part, total in zip(
            values, matrices, factors, bases, own, totals, strict=True
        ):
            updates.append(tf.reshape(multiply(basis, total), value.shape))
            # Uses the kernel of the update: tf.matmul may round to TF32 on a GPU, and the error would
            # lose that difference.
            error = matrix - multiply(basis, part)
            errors.append(tf.reshape(error, value.shape))
            # A direction that was not valid has no product: its old column of Q is used again.
            new.append(tf.where(valid, normalize(total), factor))
        return updates, errors, new, others


class SixteenBit:
    """Sends and sums gradients in float16 or bfloat16, with error feedback.

    The rounding error of a replica's contribution is added to its next contribution (Seide et al. 2014,
    "1-bit stochastic gradient descent"). The rounding error of the sums over the replicas is lost,
    because no replica can compute it.

    Args:
        dtype: the dtype in which values are sent.
    """

    def __init__(self, dtype: tf.DType):
        self._dtype = dtype

    def sent_bytes(self, shape: Sequence[int], dtype: tf.DType) -> int:
        """Returns the bytes that a replica sends for a variable of this shape, of any dtype."""
        return math.prod(shape) * self._dtype.size

    def applies(self, shape: Sequence[int]) -> bool:
        """Returns whether a variable of this shape is compressed: every variable is."""
        return True

    def initial_factor(self, shape: Sequence[int], index: int) -> np.ndarray | None:
        """Returns None: this method keeps no state except for the errors."""
        return None

    def reduce(
        self,
        values: Sequence[tf.Tensor],
        factors: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor],
        sum_over_replicas: Sum,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Reduces gradients; see `PowerSgd.reduce`."""
        sent = [self._round(value) for value in values]
        errors = [
            value - tf.cast(part, value.dtype) for value, part in zip(values, sent, strict=True)
        ]
        sums = sum_over_replicas([*sent, *others])
        updates = [tf.cast(total, value.dtype) for value, total in zip(values, sums, strict=False)]
        return updates, errors, [], sums[len(values) :]

    def _round(self, value: tf.Tensor) -> tf.Tensor:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # If an element could overflow in the sum, a part of it is sent now, and the rest in later steps.
        # Infinity and NaN are sent unchanged, so that the step detects them.
        bound = _LARGEST[self._dtype] / 2 ** int(np.ceil(np.log2(replicas)))
        clipped = tf.clip_by_value(value, -bound, bound)
        return tf.cast(tf.where(tf.math.is_finite(value), clipped, value), self._dtype)


def orthonormalize(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes the columns of a matrix orthonormal, from left to right (modified Gram-Schmidt).

    A column that, within rounding, depends linearly on the columns before it becomes zero: the rest is
    rounding noise, which differs with the order of sums. If any element is not finite, all elements of
    the result are NaN, so that the step detects it.

    Args:
        matrix: [n, rank].

    Returns:
        [n, rank], the orthonormal columns; and [rank] bool, False for each column that became zero.
    """
    least = np.sqrt(np.finfo(matrix.dtype.as_numpy_dtype).eps)
    columns: list[tf.Tensor] = []
    valid = []
    for column in tf.unstack(normalize(matrix), axis=1):
        for _ in range(2):  # a single pass leaves rounding errors of up to eps / least
            for other in columns:
                column -= other * sum_elements(other * column)
        norm = tf.sqrt(sum_elements(tf.square(column)))
        is_direction = norm > least
        valid.append(is_direction)
        columns.append(tf.where(is_direction, tf.math.divide_no_nan(column, norm), 0.0))
    # A comparison with NaN is False, which would turn a column of NaN into zeros.
    finite = tf.reduce_all(tf.math.is_finite(matrix))
    return tf.where(finite, tf.stack(columns, axis=1), np.nan), tf.stack(valid)


def normalize(matrix: tf.Tensor) -> tf.Tensor:
    """Divides each column of a matrix by its norm; a column of zeros stays zero.

    It is divided by its largest element first, so that squares of small numbers do not underflow.
    """
    largest = tf.reduce_max(tf.abs(matrix), axis=0)
    scaled = tf.math.divide_no_nan(matrix, largest)
    squares = [sum_elements(column) for column in tf.unstack(tf.square(scaled), axis=1)]
    return tf.math.divide_no_nan(scaled, tf.sqrt(tf.stack(squares)))


def multiply(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Returns the product of [n, rank] and the transpose of [m, rank], with the same bits on every CPU.

    It is computed as the sum of `rank` outer products, from left to right.
    """
    columns = zip(tf.unstack(left, axis=1), tf.unstack(right, axis=1), strict=True)
    # TensorFlow's optimizer of graphs sorts the products by name before it adds them. In a scope of
    # their own their names, and so the order, do not depend on other operations of the graph.
    with tf.name_scope("multiply"):
        products = [a[:, None] * b[None, :] for a, b in columns]
        return functools.reduce(tf.add, products)


def sum_elements(values: tf.Tensor) -> tf.Tensor:
    """Returns the scalar sum of [n] values, with the same bits for any number of threads."""
    while values.shape[0] > _BLOCK:
        padded = tf.pad(values, [[0, -values.shape[0] % _BLOCK]])
        values = tf.reduce_sum(tf.reshape(padded, [-1, _BLOCK]), axis=1)
    return tf.reduce_sum(values)


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
        start: the first step that is compressed.
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
        self.start = options.compression_start
        self._strategy = strategy
        self._kept: dict[int, _Kept] = {}
        self._reported: set[str] = set()
        self.is_active = not self.start
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
        start = f" from step {self.start} on" if self.start else ""
        return f"{self.name}{start}: {sent:.2f} MiB in place of {plain:.2f} MiB"

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
        variables += [v for model in built for v in variables_of(model)]  # includes other modules
        return [
            v
            for v in {id(v): v for v in variables if v.trainable}.values()
            if id(v) not in self._kept and v.dtype.is_floating and self._method.applies(v.shape)
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
