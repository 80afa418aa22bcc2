"""Builds a trainer's model and optimizer as functions of the seed and the precision."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import random
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs import compatibility
from ctl.configs.error_location import describe, user_line
from ctl.configs.options import TrainerOptions
from ctl.configs.rule import Choice
from ctl.data.autograph import traced
from ctl.errors import UsageError, type_name
from ctl.hardware import strategies
from ctl.replica.arithmetic import precision
from ctl.replica.step import keras_version


def check_before_model(options: TrainerOptions, strategy: tf.distribute.Strategy) -> None:
    """Rejects options for which tf_keras would fail, with its own error, while the model is built.

    Args:
        options: the trainer's options.
        strategy: where the replicas are.

    Raises:
        UsageError: a dtype is not supported, or a key of `model` that ctl defines has a wrong value.
    """
    choice = Choice(
        precision=options.precision,
        reduce_dtype=options.all_reduce_dtype,
        compression=options.compression,
        rank=options.compression_rank,
        strategy=strategies.strategy_name(strategy),
        cpu_collectives=strategies.uses_cpu_collectives(strategy),
        shard_state=options.shard_state,
    )
    compatibility.check(choice)
    value = options.model.get("sync_batch_norm")
    if value not in (None, False, True, "per_micro_batch"):
        raise UsageError(
            f"model.sync_batch_norm is {value!r}, but must be True, False or 'per_micro_batch'."
        )
    # Only the trainer's own code reads model.recompute; if it does not, the key is rejected as unread.
    if options.recompute not in (None, "", "blocks"):
        value = options.recompute
        raise UsageError(f"model.recompute is {value!r}, but must be 'blocks', or '' for none.")


@contextlib.contextmanager
def seed_and_precision(options: TrainerOptions) -> Iterator[None]:
    """Makes everything that is built inside a function of the seed and the precision alone.

    The generators of Python, numpy and TensorFlow are seeded. Those of Python and numpy are restored
    afterwards.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # This sets TensorFlow's global seed too, which is not restored: it has no public getter.
    tf_keras.utils.set_random_seed(options.seed)
    try:
        with precision.precision_scope(options.precision):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def build_scope(options: TrainerOptions, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Combines the strategy's scope with the seed and the precision of a trainer's options."""
    with seed_and_precision(options), strategy.scope():
        yield


def make_optimizer(build: Callable[[], Any]) -> Any:
    """Returns the optimizer that `build` makes.

    All replicas assign the variable that holds a schedule's current rate. Central storage allows that
    only for a variable with an aggregation, which tf_keras does not set.
    """

    def add_aggregation(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        if arguments.get("name") == "current_learning_rate":
            arguments["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return next_creator(**arguments)

    with tf.variable_creator_scope(add_aggregation):
        return build()


def check_model(model: Any) -> tf_keras.Model:
    """Returns what `build_model` returned, or raises a UsageError if it is not a tf_keras model."""
    keras_version.check_tracked(model, "build_model returned")
    if not isinstance(model, tf_keras.layers.Layer):
        raise UsageError(
            f"build_model returned {type_name(model)}, but must return a tf_keras.Model."
        )
    return model


def check_optimizer(optimizer: Any) -> Any:
    """Returns an optimizer, or raises a UsageError if it cannot compute the update of a step."""
    inner = optimizer.inner_optimizer if precision.has_loss_scale(optimizer) else optimizer
    keras_version.check_tracked(inner, "The optimizer is")
    if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
        name = type(inner).__name__
        raise UsageError(
            f"The optimizer is {type_name(inner)} of tf_keras.optimizers.legacy: use "
            f"tf_keras.optimizers.{name}."
        )
    if not isinstance(inner, tf_keras.optimizers.Optimizer):
        shown = repr(inner) if isinstance(inner, str) else type_name(inner)
        raise UsageError(
            f"The optimizer is {shown}, but must be an optimizer of tf_keras, or a function that makes "
            "one: write for example optimizer=lambda: tf_keras.optimizers.Adam(1e-3)."
        )
    nadam = tf_keras.optimizers.Nadam
    if isinstance(inner, nadam) and type(inner).update_step is nadam.update_step:
        # The count is a constant of the trace, and differs from variable to variable and from replica
        # to replica: even on one replica, equal gradients change equal variables differently.
        raise UsageError(
            "tf_keras.optimizers.Nadam counts its updates in Python, which is wrong in a traced step: "
            "use Adam or AdamW, or override its update_step."
        )
    return optimizer


def create_variables(forward: Callable[[Any], Any], spec: Any) -> None:
    """Creates a model's variables, so that a checkpoint can be restored before the first step.

    The forward pass is traced and not run: the model may not accept an example of zeros.

    Args:
        forward: the forward pass.
        spec: the `tf.TensorSpec`s of a batch.
    """
    # A trace computes nothing, and it accepts a spec with an unknown number of rows.
    traced(forward).get_concrete_function(spec)


@contextlib.contextmanager
def report_rejected_features(features: Mapping[str, Any]) -> Iterator[None]:
    """Turns tf_keras' error about a model's inputs into a UsageError; for the default `forward`.

    Args:
        features: name -> spec of the features of a batch.

    Raises:
        UsageError: the model does not accept the features.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError) or user_line(error):
            raise
        passed = [name for name in features if name not in ("label", "weight")]
        fix = "fix the model's inputs or the data"
        if "label" not in features and len(passed) > 1:
            fix = 'name the target "label", which is not passed to the model'
        raise UsageError(
            f"The model does not accept {', '.join(passed)} ({describe(error)}): {fix}, or override "
            "forward."
        ) from error
