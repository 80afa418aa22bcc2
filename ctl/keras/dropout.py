"""Random tf_keras layers keyed by (seed, layer, step, row of the global batch).

tf_keras draws a dropout mask from a stateful generator, one on each replica: the mask depends on how
the batch is split and on how often the process was restarted. In a training step, layers draw by
`ctl.random.draws` instead, and there is no state to save.
"""

import contextvars
import functools
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.rows import row_mask
from ctl.rows.trace import Stream

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
            identity = f"ctl {seed} {scope}/{index} {generator._seed}"
            generator.ctl_stream = Stream(identity, f"Layer {layer.name}")
            names.append(layer.name)
    return names


def draw(original: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws by row in a step, for a method of the generators of all tf_keras layers.

    A layer that is made while the step is traced, or that no model contains, has no stream of its own.
    Such draws are numbered in the order in which the step is traced, which is the same in every process
    and for every split.
    """
    stream = getattr(generator, "ctl_stream", None)
    # Initializers have generators of type "stateless", which draw the same on every replica. They
    # run outside of the graph of the step, or in it if a layer is built there.
    is_keyed = stream or (generator._rng_type != generator.RNG_STATELESS and row_mask.in_step())
    rows = row_mask.current() if is_keyed and not _UNKEYED.get() else None
    if rows is None:
        return original(generator, *args, **kwargs)
    if stream is None:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        scope = graph.get_name_scope() if graph else ""
        stream = Stream(f"ctl layers {rows.seed}", f"Layer {scope or 'in a step'}")
    from ctl.keras import generator_draws  # for a layer that draws in a step: most models have none

    try:
        return generator_draws.KEYED[original.__name__](stream, *args, **kwargs)
    except UsageError:
        if not rows.allow_unkeyed:
            raise
    token = _UNKEYED.set(True)
    try:
        return original(generator, *args, **kwargs)
    finally:
        _UNKEYED.reset(token)


def call_with_new_masks(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a recurrent layer with new masks, as tf_keras' other recurrent layers do.

    Its cell keeps the masks of a graph, which would be those of another replica or micro-batch.
    """
    layer.cell.reset_dropout_mask()
    layer.cell.reset_recurrent_dropout_mask()
    return original(layer, *args, **kwargs)
