"""Random numbers for the code of a step that do not depend on how the batch is split.

    def preprocess(self, batch):                                    # one noise level per image
        level = ctl.random.uniform([None, 1, 1, 1], maxval=0.1)
        noise = ctl.random.normal(tf.shape(batch["image"]))
        return {**batch, "image": batch["image"] + level * noise}

Axis 0 of a shape holds the rows of this replica; None stands for their number. The numbers of a row are
a function of the seed of the run, the name of the draw (or its position among the draws of the step
that have no name), the step and the position of the row in the global batch: they are the same on any
number of replicas and micro-batches, under every `runtime.xla`, and after a resume. In a loop
(`tf.while_loop`, `tf.scan`, recurrent layers) each iteration draws other numbers. If each row has
several consecutive entries on axis 0, pass their number as `per_row`, or let ctl find it from the
reshape. With `shared=True` all rows of the global batch share the numbers, and the shape is free:

    ratio = ctl.random.uniform([], shared=True)

An evaluation uses the position of the row in the evaluation data: all evaluations draw the same numbers.
An optimizer has no rows: its draws are the same on every replica. Outside of a step a draw is a function
of its arguments alone, with row 0 first; on a replica it is an error.

All functions take these arguments besides their own:

* `name`: identifies the draw. Two draws with the same name in a step draw different numbers; a named
  draw keeps its numbers if other draws are added before it.
* `seed`: distinguishes draws further, such as the draws of several instances of a layer.
* `shared`: draw the same numbers for all rows, on every replica.
* `per_row`: the number of consecutive entries of each row on axis 0.

The default `dtype` of the functions that draw floats is float32 under every policy and `floatx`, as in
`tf.random`. TensorFlow does not add float32 and float64 numbers, so code that also runs in float64, as
under `ctl check`, passes the dtype of the tensor that it adds the numbers to: `dtype=x.dtype`.

`with ctl.random.keyed():` keys the numbers that the code of a library draws by `tf.random`.

The specification of the step, section 10, defines the bits. Floats have 23 random bits (float16: 10;
bfloat16: 7).
"""

from collections.abc import Callable, Iterator
import contextlib
import math
from typing import Any, TypedDict

import tensorflow as tf
from typing_extensions import Unpack

from ctl.errors import UsageError
from ctl.private.replaced import KEYED
from ctl.random import draws, philox
from ctl.random.philox import Number, Shape
from ctl.rows import gather, row_mask
from ctl.rows.trace import Stream

__all__ = [
    "bernoulli", "beta", "categorical", "cutmix", "dropout", "gumbel", "integers", "keyed", "mixup",
    "normal", "permutation_of_batch", "truncated_normal", "uniform", "unkeyed",
]  # fmt: skip


class Keying(TypedDict, total=False):
    """The arguments that all functions take."""

    name: str
    seed: int
    shared: bool
    per_row: int | None


def uniform(
    shape: Shape,
    minval: Number = 0.0,
    maxval: Number = 1.0,
    dtype: tf.DType = tf.float32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws uniform numbers in [minval, maxval).

    Args:
        shape: [rows, ...].
        minval: the lower bound, a number or a tensor that broadcasts to `shape`.
        maxval: the upper bound, in the same form.
    """
    dtype = _floating(dtype, "uniform")
    unit = _draw(draws.uniform, "uniform", shape, dtype=dtype, **keying)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return tf.cast(unit, dtype) * (high - low) + low


def normal(
    shape: Shape,
    mean: Number = 0.0,
    stddev: Number = 1.0,
    dtype: tf.DType = tf.float32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws numbers from a normal distribution; `mean` and `stddev` broadcast to `shape`."""
    dtype = _floating(dtype, "normal")
    numbers = _draw(draws.normal, "normal", shape, dtype=dtype, **keying)
    return tf.cast(numbers, dtype) * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def truncated_normal(
    shape: Shape,
    mean: Number = 0.0,
    stddev: Number = 1.0,
    dtype: tf.DType = tf.float32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws normal numbers that are within two standard deviations of the mean."""
    dtype = _floating(dtype, "truncated_normal")
    unit = _draw(draws.uniform, "truncated_normal", shape, **keying)
    unit = tf.cast(unit, philox.working_dtype(dtype))
    # The inverse of the distribution function: one number per element, in contrast to rejection.
    low = 0.5 * math.erfc(math.sqrt(2.0))  # the probability below -2
    numbers = tf.clip_by_value(tf.math.ndtri(low + unit * (1 - 2 * low)), -2.0, 2.0)
    return tf.cast(numbers, dtype) * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def bernoulli(
    shape: Shape,
    p: Number = 0.5,
    dtype: tf.DType = tf.bool,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws True (or 1, in another `dtype`) with probability `p`, which broadcasts to `shape`."""
    unit = _draw(draws.uniform, "bernoulli", shape, **keying)
    return tf.cast(unit < tf.cast(p, tf.float32), dtype)


def integers(
    shape: Shape,
    minval: Number,
    maxval: Number,
    dtype: tf.DType = tf.int32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws integers in [minval, maxval), scalars that are at most 2^32 apart.

    Args:
        shape: [rows, ...].
        minval: the lowest integer.
        maxval: the highest integer plus 1.
        dtype: tf.int32 or tf.int64, or another integer dtype that contains the range.
    """
    dtype = tf.as_dtype(dtype)
    low, high = tf.get_static_value(minval), tf.get_static_value(maxval)
    if not dtype.is_integer:
        raise UsageError(f"ctl.random.integers got dtype {dtype.name}, but requires integers.")
    if low is not None and high is not None and not 0 < int(high) - int(low) <= 2**32:
        raise UsageError(
            f"ctl.random.integers got the range [{low}, {high}), but requires 1 to 2^32 integers."
        )
    return _draw(draws.integers, "integers", shape, minval, maxval, dtype, **keying)


def gumbel(
    shape: Shape,
    dtype: tf.DType = tf.float32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws numbers from the standard Gumbel distribution, -log(-log(u))."""
    dtype = _floating(dtype, "gumbel")
    unit = _draw(draws.uniform, "gumbel", shape, **keying)
    # The middle of the interval that a number stands for: in (0, 1), so that both logarithms are finite.
    unit = tf.cast(unit, philox.working_dtype(dtype)) + 2.0**-24
    return tf.cast(-tf.math.log(-tf.math.log(unit)), dtype)


def categorical(
    logits: tf.Tensor,
    dtype: tf.DType = tf.int64,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws a class for each row, with probabilities softmax(logits) over the last axis.

    Args:
        logits: [rows, ..., classes] log-probabilities, up to a constant.
        dtype: an integer dtype.

    Returns:
        [rows, ...] numbers of classes.
    """
    logits = tf.convert_to_tensor(logits)
    # In 16 bits the largest sums would often be equal, and the first of them would be chosen.
    logits = tf.cast(logits, philox.working_dtype(logits.dtype))
    noise = gumbel(tf.shape(logits), logits.dtype, **keying)
    # The largest of logits plus Gumbel noise is a sample (Gumbel 1954; "Gumbel-max").
    return tf.argmax(logits + noise, axis=-1, output_type=dtype)


def beta(
    shape: Shape,
    a: float,
    b: float,
    dtype: tf.DType = tf.float32,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Draws numbers in [0, 1] from the beta distribution, such as the ratios of mixup and cutmix.

    Args:
        shape: [rows, ...].
        a: the first parameter, greater than 0.
        b: the second parameter, greater than 0.
    """
    dtype = _floating(dtype, "beta")
    if not (a > 0 and b > 0):
        raise UsageError(f"ctl.random.beta got a={a}, b={b}, but both must be greater than 0.")
    # X / (X + Y) of two gamma variates, from their logarithms: X and Y underflow for small parameters.
    x = _draw(draws.log_gamma, "beta", shape, a, dtype, part="x", **keying)
    y = _draw(draws.log_gamma, "beta", shape, b, dtype, part="y", **keying)
    return tf.cast(tf.sigmoid(x - y), dtype)


def dropout(
    x: tf.Tensor,
    rate: Number,
    noise_shape: Shape | None = None,
    **keying: Unpack[Keying],
) -> tf.Tensor:
    """Sets elements of `x` to 0 with probability `rate`, and scales the rest by 1 / (1 - rate).

    Args:
        x: [rows, ...] floats.
        rate: a number or a scalar tensor in [0, 1).
        noise_shape: the shape of the mask, which broadcasts to `x`, as in `tf.nn.dropout`.
    """
    return _draw(draws.dropout, "dropout", tf.convert_to_tensor(x), rate, noise_shape, **keying)


def permutation_of_batch(*, name: str = "", seed: int = 0) -> tf.Tensor:
    """Draws a partner for each row: a permutation of the rows of the complete global batch.

        partners = ctl.random.permutation_of_batch()
        mixed = ratio * x + (1 - ratio) * tf.gather(ctl.replica.all_gather(x), partners)

    Call it where `ctl.replica.all_gather` may be called. Outside of a step there is no batch.

    Returns:
        [rows] int32, for each row of this replica the position of its partner among the rows that
        `ctl.replica.all_gather` returns. Padding has the partner of an existing row.

    Raises:
        UsageError: there is no batch, or its other rows cannot be read here.
    """
    rows = row_mask.current()
    if rows is None or rows.count is None:
        raise UsageError(
            "ctl.random.permutation_of_batch permutes the rows of a step: call it in one."
        )
    return draws.permutation(rows, _stream("permutation_of_batch", name, seed))


@contextlib.contextmanager
def keyed() -> Iterator[None]:
    """Keys the numbers that code of a library draws by TensorFlow's functions inside the `with` block.

        with ctl.random.keyed():
            z = library_layer(x)        # draws by tf.random.normal, or a distribution's sample()

    It replaces normal, truncated normal, uniform, integer and categorical numbers of `tf.random`, also
    the stateless ones, whose seeds are not used. If a shape begins with the number of this replica's
    rows (or of its views, `ctl.replica.views`), each row draws its own numbers, as of
    `ctl.random.normal`; also if a later axis is the first with this number, as of several samples of
    each row. All other draws are the same for all rows, on every replica. A shape that has this number
    by chance is rejected, with a warning if one replica computes the batch at once; so are shared
    numbers that are combined with rows. It also decorates a function:
    `layer.call = ctl.random.keyed()(layer.call)`.

    Raises:
        UsageError: the block draws in a loop, except for the rows; or for a replica with one row.
    """
    token = KEYED.set(True)
    try:
        yield
    finally:
        KEYED.reset(token)


@contextlib.contextmanager
def unkeyed() -> Iterator[None]:
    """Accepts numbers in the code inside the `with` block that ctl cannot key by row.

        with ctl.random.unkeyed():
            weights = library_layer(x)      # draws by tf.random.normal

    The update of a step then depends on how the batch is split, and on how often the run was resumed, as
    far as it depends on these numbers. It also decorates a function, so one layer of a model is
    accepted by `layer.call = ctl.random.unkeyed()(layer.call)`.
    """
    if tf.executing_eagerly():
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    # The search of the first replica sees the ops of all, which are in one graph.
    graph._ctl_accepted = {*getattr(graph, "_ctl_accepted", ()), *graph.get_operations()[before:]}


def mixup(
    images: tf.Tensor, labels: tf.Tensor, alpha: float = 0.2, *, name: str = "", seed: int = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each row with a partner of the global batch (Zhang et al. 2018, "mixup").

        def replica_step(self, batch):          # in training only
            image, label = ctl.random.mixup(batch["image"], batch["label"])
            return super().replica_step({**batch, "image": image, "label": label})

    Each row has a ratio r from the distribution Beta(alpha, alpha), as in Keras' layer MixUp: the result
    is r x + (1 - r) y, with the partner y. Call it where `permutation_of_batch` may be called.

    Args:
        images: [rows, ...] floats.
        labels: [rows, classes] floats, such as one-hot vectors.
        alpha: the parameter of the distribution, greater than 0.

    Returns:
        The mixed images and labels.
    """
    ratio = beta([None], alpha, alpha, name=name, seed=seed)
    return _mix_with_partners("mixup", images, labels, ratio, name, seed)


def cutmix(
    images: tf.Tensor, labels: tf.Tensor, alpha: float = 1.0, *, name: str = "", seed: int = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces a box of each image by that of a partner of the global batch (Yun et al. 2019, "CutMix").

    The share of the box is 1 - r, with r from the distribution Beta(alpha, alpha) for each row, and its
    place is uniform within the image, as in Keras' layer CutMix. Labels are mixed by the areas.

    Args:
        images: [rows, height, width, channels].
        labels: [rows, classes] floats, such as one-hot vectors.
        alpha: the parameter of the distribution, greater than 0.

    Returns:
        The mixed images and labels.
    """
    side = tf.sqrt(1.0 - beta([None], alpha, alpha, name=name, seed=seed))
    inside, area = tf.constant(True), tf.ones_like(side)
    for axis in (1, 2):
        size = tf.cast(tf.shape(images)[axis], tf.float32)
        start = uniform([None], name=name, seed=seed) * (size - side * size)
        places = tf.reshape(tf.range(size), [1, *[-1 if axis == i else 1 for i in (1, 2, 3)]])
        first, end = (tf.reshape(x, [-1, 1, 1, 1]) for x in (start, start + side * size))
        inside = inside & (places >= first) & (places < end)
        area *= side
    return _mix_with_partners("cutmix", images, labels, 1.0 - area, name, seed, inside=inside)


def _mix_with_partners(
    function: str, images: tf.Tensor, labels: tf.Tensor, ratio: tf.Tensor, name: str, seed: int,
    inside: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    """Mixes labels, and images unless a mask selects what is `inside` from the partner, by a ratio."""
    images, labels = tf.convert_to_tensor(images), tf.convert_to_tensor(labels)
    for value, kind in ((images, "images"), (labels, "labels (such as tf.one_hot(...))")):
        if not value.dtype.is_floating and (inside is None or value is labels):
            raise UsageError(
                f"ctl.random.{function} got {value.dtype.name}, but requires floats as {kind}."
            )
    partners = permutation_of_batch(name=name, seed=seed)
    others = tf.nest.map_structure(
        lambda rows: tf.gather(rows, partners), gather.all_gather((images, labels))
    )

    def mix(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        share = tf.reshape(tf.cast(ratio, value.dtype), [-1] + [1] * (value.shape.rank - 1))
        return share * value + (1 - share) * other

    mixed = mix(images, others[0]) if inside is None else tf.where(inside, others[0], images)
    return mixed, mix(labels, others[1])


def _draw(
    draw: Callable[..., tf.Tensor],
    function: str,
    shape: Shape,
    *arguments: Any,
    name: str = "",
    seed: int = 0,
    part: str = "",
    per_row: int | None = None,
    **options: Any,
) -> tf.Tensor:
    stream = _stream(function, name, seed, part)
    shape = row_mask.fill_rows(shape, per_row)
    numbers = draw(shape, stream, *arguments, per_row=per_row, **options)
    rows = row_mask.current()
    if rows and options.get("shared") and numbers.shape[:1] in ([None], [rows.count]):
        rows.trace.shared.append(numbers)  # perhaps one for each row
    return numbers


def _stream(function: str, name: str, seed: int, part: str = "") -> Stream:
    rows = row_mask.current()
    shown = f"ctl.random.{function}" + (f' (name="{name}")' if name else "")
    return Stream(f"ctl.random {rows.seed if rows else 0} {name!r} {seed}{part}", shown)


def _floating(dtype: tf.DType, function: str) -> tf.DType:
    dtype = tf.as_dtype(dtype)
    if not dtype.is_floating:
        raise UsageError(f"ctl.random.{function} got dtype {dtype.name}, but requires floats.")
    return dtype
