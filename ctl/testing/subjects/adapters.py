"""A `Loop`, and the trainers of Orbit and compiled models of Keras 2 and Keras 3 that become one."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import UsageError
from ctl.step import Step
from ctl.testing.contents import holders


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop: its step, and everything that the step may change.

        def build(strategy, global_batch_size):
            with strategy.scope():
                model, optimizer = make_model(), tf_keras.optimizers.Adam()

            @tf.function
            def step(batch):
                losses = strategy.run(replica_step, args=(batch,))
                return strategy.reduce("SUM", losses, axis=None)

            return ctl.testing.Loop(step, [model, optimizer])

    Any other object with a method `step` and an attribute `variables` is a loop, too.

    Attributes:
        step: takes a global batch, distributed over the replicas as the strategy's datasets
            distribute it, trains one step, and returns the loss, a dict of numbers, or None. An
            evaluation step may be compared in the same way.
        variables: models, layers, optimizers, metrics, and variables. The comparison needs the
            optimizers to recognize a factor of the gradients, which Adam hides.
        distributed: False if `step` takes the rows of the global batch as arrays, and distributes
            them itself.
    """

    step: Callable[[Any], Any]
    variables: Sequence[Any]
    distributed: bool = True


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
    if isinstance(value, Step):
        return _own_loop(value)
    if isinstance(value, orbit.StandardTrainer):
        return _orbit_loop(value)
    if getattr(value, "optimizer", None) is not None and hasattr(value, "fit"):
        return _fit_loop(value)
    if callable(getattr(value, "step", None)) and hasattr(value, "variables"):
        return Loop(
            value.step, [value.variables() if callable(value.variables) else value.variables]
        )
    raise UsageError(
        f"build returned {type(value).__name__}, but must return a ctl.testing.Loop(step, variables), "
        "an object with `step` and `variables`, an orbit.StandardTrainer or a compiled Keras model."
    )


def _own_loop(step: Step) -> Loop:
    """Wraps a `ctl.Step`, which names the features of an element itself."""

    def train(batch: Any) -> Mapping[str, Any]:
        step(batch)
        return step.results()

    return Loop(train, holders(vars(step)))


def _orbit_loop(trainer: orbit.StandardTrainer) -> Loop:
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

    return Loop(train, holders(vars(trainer)))


def _fit_loop(model: Any) -> Loop:
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
