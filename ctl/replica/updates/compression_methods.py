"""Methods that compress gradients for their sum over the replicas.

`SixteenBit` sends float16 or bfloat16. `PowerSgd` sends the factors of a matrix of low rank.
"""

from collections.abc import Callable, Sequence
import functools
import math

import numpy as np
import tensorflow as tf

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
    products = [a[:, None] * b[None, :] for a, b in columns]
    return functools.reduce(tf.add, products)


def sum_elements(values: tf.Tensor) -> tf.Tensor:
    """Returns the scalar sum of [n] values, with the same bits for any number of threads."""
    while values.shape[0] > _BLOCK:
        padded = tf.pad(values, [[0, -values.shape[0] % _BLOCK]])
        values = tf.reduce_sum(tf.reshape(padded, [-1, _BLOCK]), axis=1)
    return tf.reduce_sum(values)
