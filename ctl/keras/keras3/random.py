"""Random layers of Keras 3 keyed by (seed, layer, step, row of the global batch).

All layers of Keras 3, and `keras.random`, draw by a few functions of one module, with a SeedGenerator.
In a step these functions draw by `ctl.random.draws` for the generators that a model holds, and
reject other generators, whose state would depend on restarts and on the split of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.errors import UsageError
from ctl.keras import dropout
from ctl.keras.keras3 import private
from ctl.keras.keras3.adapter import Adapter, hide_rows, prepare
from ctl.random import draws
from ctl.rows import row_mask
from ctl.rows.trace import Stream

_FIX = (
    "do it in the input pipeline, draw with ctl.random, or use a layer that draws one number per "
    "element"
)


@dropout.key_random_layers.register
def _key(model: Adapter, seed: int, *, scope: str = "model") -> list[str]:
    prepare(model.inner)  # layers may have been created since
    names = []
    # By the position of a layer, since Keras counts names up within a process.
    for index, layer in enumerate(layer.inner for layer in model._flatten_layers()):
        for number, generator in enumerate(private.seed_generators(layer)):
            # The same key as that of the layer in tf_keras, which has one generator.
            own = f"{generator.get_config()['seed']}{f' {number}' if number else ''}"
            stream = Stream(f"ctl {seed} {scope}/{index} {own}", f"Layer {layer.name}")
            generator.ctl_stream = stream
            names.append(layer.name)
    return names


def _dropout(
    stream: Stream, inputs: Any, rate: Any, noise_shape: Any = None, **_: Any
) -> tf.Tensor:
    shared = noise_shape is not None and draws.static_size(noise_shape) == 1
    if shared and inputs.shape[0] == 1:
        raise UsageError(
            f"{stream.name} draws a mask of shape [1, ...] for one row, which may be that row's mask or "
            "one for all rows: use a batch with at least two rows in each replica and micro-batch."
        )
    if noise_shape is not None:
        known, sizes = inputs.shape, tf.shape(inputs)
        inner = [(known[i] or sizes[i]) if n is None else n for i, n in enumerate(noise_shape)][1:]
        noise_shape = tf.stack([1 if shared else sizes[0], *inner])
    return draws.dropout(inputs, stream, rate, noise_shape, shared=shared)


def _uniform(
    stream: Stream, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, **_: Any
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    _check(stream, shape, dtype)
    numbers = tf.cast(hide_rows(draws.uniform(shape, stream)), dtype)
    return numbers * tf.cast(maxval - minval, dtype) + tf.cast(minval, dtype)


def _normal(
    stream: Stream, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, **_: Any
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    _check(stream, shape, dtype)
    numbers = hide_rows(draws.normal(shape, stream, dtype=dtype))
    return tf.cast(numbers, dtype) * stddev + mean


def _check(stream: Stream, shape: Sequence[Any], dtype: tf.DType) -> None:
    if not dtype.is_floating or not len(shape):
        what = f"a scalar {dtype.name}" if not len(shape) else f"{dtype.name} numbers"
        raise UsageError(
            f"{stream.name} draws {what}, which cannot be keyed by the rows of the global batch: {_FIX}."
        )


def _draw_seed(seed: Any) -> None:
    """Raises UsageError: another function than those above draws, or an unknown generator."""
    stream = getattr(seed, "ctl_stream", None)
    if stream is None:
        raise UsageError(
            "The step draws from a generator of Keras 3 that no layer of the trainer's models holds, so "
            "that its state is not saved and its numbers depend on how the batch is split: make the "
            "SeedGenerator an attribute of a layer, or draw with ctl.random."
        )
    raise UsageError(
        f"{stream.name} draws random numbers that cannot be keyed by the rows of the global batch: "
        f"{_FIX}."
    )


def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws by rows in a step, for a function of Keras."""
    name = original.__name__
    seed = kwargs.get("seed", args[0] if name == "draw_seed" and args else None)
    rows = row_mask.current()
    # An integer seed is a constant, which the search of the step's ops checks. An integer step is
    # that of a model that is being built, whose layers are not keyed yet.
    if rows is None or not row_mask.in_step() or isinstance(seed, int):
        return original(*args, **kwargs)
    if isinstance(rows.step, int) and not hasattr(seed, "ctl_stream"):
        return original(*args, **kwargs)
    if name == "draw_seed":
        return original(seed) if rows.allow_unkeyed else _draw_seed(seed)
    stream = getattr(seed, "ctl_stream", None)
    if stream is None:
        return original(*args, **kwargs)  # calls draw_seed
    try:
        keyed: Any = {"dropout": _dropout, "uniform": _uniform, "normal": _normal}[name]
        return keyed(stream, *args, **kwargs)
    except UsageError:
        if not rows.allow_unkeyed:
            raise
        return original(*args, **kwargs)
