"""Random tf_keras layers keyed by (seed, layer, step, row of the global batch).

tf_keras draws a dropout mask from a stateful generator, one on each replica: the mask depends on how
the batch is split and on how often the process was restarted. In a training step, layers draw by
`ctl.replica.random.draws` instead, and there is no state to save.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src import backend

from ctl.errors import UsageError
from ctl.replica.arithmetic import row_mask
from ctl.replica.random import draws, image_layers  # noqa: F401 - keys layers of tf_keras
from ctl.replica.random.draws import Stream

_DRAWING = (
    "dropout",
    "random_uniform",
    "random_normal",
    "truncated_normal",
    "make_seed_for_stateless_op",
    "make_legacy_seed",
)
# Whether the layers of tf_keras draw as if there was no step, because the options accept it.
_UNKEYED = contextvars.ContextVar("unkeyed", default=False)


@functools.singledispatch
def key_random_layers(
    model: tf_keras.layers.Layer, seed: int, *, scope: str = "model"
) -> list[str]:
    """Makes every random layer of a model draw by (seed, layer, step, row) in training steps.

    This covers the layers that draw one number per example or element through tf_keras'
    `RandomGenerator`: Dropout and its variants, GaussianNoise, recurrent and attention dropout.

    Args:
        model: a built or unbuilt model; it is changed in place, except for its weights.
        seed: the seed of the run.
        scope: the name of the model, which distinguishes the layers of several models.

    Returns:
        The names of the layers that were changed.
    """
    names = []
    # Keyed by the position of a layer: tf_keras counts names up within a process, so a model that is
    # built a second time has other names.
    for index, layer in enumerate(model._flatten_layers()):
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            # A model that is keyed again keeps a single wrapper.
            replaced = getattr(generator, "_replaced", generator)
            identity = f"ctl {seed} {scope}/{index} {replaced._seed}"
            layer._random_generator = RowKeyedGenerator(
                replaced, Stream(identity, f"Layer {layer.name}")
            )
            names.append(layer.name)
    return names


class RowKeyedGenerator:
    """Replaces the `RandomGenerator` of one layer.

    Outside of a training step it delegates to the generator that it replaced.

    Args:
        replaced: the tf_keras `RandomGenerator` to replace.
        stream: the identity of the layer.
    """

    def __init__(self, replaced: Any, stream: Stream):
        self._replaced = replaced
        self._stream = stream

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._replaced, attribute)

    def dropout(self, inputs: tf.Tensor, rate: float, noise_shape: Any = None) -> tf.Tensor:
        """Drops elements of `inputs` as `tf.nn.dropout` does, by the numbers of their rows."""

        def draw() -> tf.Tensor:
            # A noise shape that starts with 1 has one mask for all rows: the mask of row 0 everywhere.
            shared = noise_shape is not None and draws.static_size(noise_shape) == 1
            return draws.dropout(inputs, rate, noise_shape, self._stream, shared=shared)

        return self._keyed(draw, lambda: self._replaced.dropout(inputs, rate, noise_shape))

    def random_uniform(
        self,
        shape: Any,
        minval: float = 0.0,
        maxval: float | None = None,
        dtype: Any = None,
        nonce: int | None = None,
    ) -> tf.Tensor:
        """Draws uniform numbers in [minval, maxval); axis 0 of `shape` is this replica's rows."""

        def draw() -> tf.Tensor:
            numbers_dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
            if not numbers_dtype.is_floating:
                self._reject(f"draws {numbers_dtype.name} numbers")
            numbers = tf.cast(draws.uniform(shape, self._stream), numbers_dtype)
            return numbers * ((1.0 if maxval is None else maxval) - minval) + minval

        return self._keyed(
            draw, lambda: self._replaced.random_uniform(shape, minval, maxval, dtype, nonce)
        )

    def random_normal(
        self,
        shape: Any,
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: Any = None,
        nonce: int | None = None,
    ) -> tf.Tensor:
        """Draws normal numbers; axis 0 of `shape` is this replica's rows."""

        def draw() -> tf.Tensor:
            numbers_dtype = tf.as_dtype(dtype or tf_keras.backend.floatx())
            numbers = draws.normal(shape, self._stream, dtype=numbers_dtype)
            return tf.cast(numbers, numbers_dtype) * stddev + mean

        return self._keyed(
            draw, lambda: self._replaced.random_normal(shape, mean, stddev, dtype, nonce)
        )

    def truncated_normal(self, shape: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        """Raises UsageError in a step: rejection sampling uses a varying number of draws per row."""
        return self._keyed(
            lambda: self._reject("draws from a truncated normal distribution"),
            lambda: self._replaced.truncated_normal(shape, *args, **kwargs),
        )

    def make_seed_for_stateless_op(self) -> tf.Tensor:
        """Raises UsageError in a step: the layer would draw for its local batch, not per row."""
        return self._keyed(
            lambda: self._reject("draws for its complete local batch"),
            self._replaced.make_seed_for_stateless_op,
        )

    def make_legacy_seed(self) -> int | None:
        """Raises UsageError in a step, like `make_seed_for_stateless_op`."""
        return self._keyed(
            lambda: self._reject("draws for its complete local batch"),
            self._replaced.make_legacy_seed,
        )

    def _keyed(self, draw: Callable[[], Any], replaced: Callable[[], Any]) -> Any:
        """Draws by row in a step, and as tf_keras does outside of one."""
        rows = row_mask.current()
        if rows is None:
            return replaced()
        try:
            return draw()
        except UsageError:
            if not rows.allow_unkeyed:
                raise
        with _as_in_tf_keras():
            return replaced()

    def _reject(self, problem: str) -> Any:
        raise UsageError(
            f"{self._stream.name} {problem}, which cannot be keyed by the rows of the global batch: do "
            "it in the input pipeline, draw with ctl.random, or use a layer that draws one number per "
            "element."
        )


@contextlib.contextmanager
def _as_in_tf_keras() -> Iterator[None]:
    token = _UNKEYED.set(True)
    try:
        yield
    finally:
        _UNKEYED.reset(token)


def _key_generators() -> None:
    """Makes every other tf_keras layer draw by row in a training step, wherever it is held.

    Layers that are made while the step is traced, or that no model contains, cannot be listed
    beforehand. Their draws are numbered in the order in which the step is traced, which is the same in
    every process and for every split.
    """
    for method in _DRAWING:
        _key_method(getattr(backend.RandomGenerator, method))


def _key_method(original: Any) -> None:
    @functools.wraps(original)
    def draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Initializers have generators of type "stateless", which draw the same on every replica. They
        # run outside of the graph of the step, or in it if a layer is built there.
        if self._rng_type == self.RNG_STATELESS or _UNKEYED.get() or not row_mask.in_step():
            return original(self, *args, **kwargs)
        rows = row_mask.current()
        scope = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()
        stream = Stream(f"ctl layers {rows.seed if rows else 0}", f"Layer {scope or 'in a step'}")
        return getattr(RowKeyedGenerator(self, stream), original.__name__)(*args, **kwargs)

    setattr(backend.RandomGenerator, original.__name__, draw)


if not hasattr(backend.RandomGenerator.dropout, "__wrapped__"):
    _key_generators()
