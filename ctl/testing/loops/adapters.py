"""Wraps trainers of Orbit and compiled models of Keras 2 and Keras 3 as a `Loop`."""

from collections.abc import Mapping
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing.loops.protocol import Loop, has_variables
from ctl.testing.nested import named_leaves, unwrap


def adapt(value: Any) -> Loop:
    """Wraps the object that `build` returned as a loop.

    Args:
        value: a `Loop`, another object with `step` and `variables`, an `orbit.StandardTrainer`, or
            a compiled model of tf_keras or Keras 3.

    Raises:
        UsageError: the object is none of these.
    """
    if isinstance(value, Loop):
        return value
    if isinstance(value, orbit.StandardTrainer):
        return orbit_loop(value)
    if getattr(value, "optimizer", None) is not None and hasattr(value, "fit"):
        return fit_loop(value)
    if callable(getattr(value, "step", None)) and hasattr(value, "variables"):
        return Loop(
            value.step, [value.variables() if callable(value.variables) else value.variables]
        )
    raise UsageError(
        f"build returned {type(value).__name__}, but must return a ctl.testing.Loop(step, variables), "
        "an object with `step` and `variables`, an orbit.StandardTrainer or a compiled Keras model."
    )


def orbit_loop(trainer: orbit.StandardTrainer) -> Loop:
    """Wraps a trainer of Orbit, whose `train_step` takes the batches of the comparison.

    Args:
        trainer: the trainer. Its dataset is not read; everything that is an attribute is compared.
    """

    def copy(batch: Any) -> Any:  # `train_step` may remove features from it
        return tf.nest.map_structure(lambda value: value, batch)

    # Each call of `next` in one step gets the same batch.
    step = tf.function(lambda batch: trainer.train_step(iter(lambda: copy(batch), None)))

    def train(batch: Any) -> Any:
        trainer.train_loop_begin()
        step(batch)
        return trainer.train_loop_end()

    items = [item for _, item in named_leaves(unwrap(dict(vars(trainer))))]
    with_variables = [v for v in items if isinstance(v, tf.Variable) or has_variables(v)]
    return Loop(train, with_variables)


def fit_loop(model: Any) -> Loop:
    """Wraps a compiled model of tf_keras or Keras 3, and trains it by the function that `fit` calls.

    Args:
        model: the model. The examples must be a tuple (inputs, targets) or (inputs, targets,
            sample weights).
    """

    def train(batch: Any) -> Mapping[str, Any]:
        rows = len(tf.nest.flatten(batch)[0])
        options = tf.data.Options()
        options.autotune.enabled = False  # deleting the iterator may wait for autotune's thread
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = tf.data.Dataset.from_tensor_slices(batch).batch(rows).with_options(options)
        if model.train_function is None:
            model.fit(dataset, verbose=0, shuffle=False)
            return {}
        strategy = model.distribute_strategy
        results = model.train_function(iter(strategy.experimental_distribute_dataset(dataset)))
        return dict(results)

    return Loop(train, [model, model.optimizer], distributed=False)
