"""The exponential moving average of the weights, which is evaluated and exported in their place.

tf_keras' own `use_ema` averages with a constant decay, which keeps the random initial weights for
thousands of updates; it omits the moving statistics of batch normalization, and evaluates nothing by
itself. Model Garden's average is a legacy optimizer, which cannot apply a reduced gradient.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError
from ctl.keras.precision import Optimizer
from ctl.keras.variables import variables_of
from ctl.update.part import AVERAGES, Part
from ctl.update.plan import Plan


class ExponentialMovingAverage(Part):
    """Averages of the weights of models, updated once per applied update.

    average += (1 - d) * (weight - average), where d = min(decay, (1 + t) / (10 + t)) after update t, as
    in `tf.train.ExponentialMovingAverage` with `num_updates`. So the first averages forget the random
    initial weights. All floating-point variables of the models are averaged: the trainable ones, and
    the moving statistics of batch normalization, which must belong to the averaged weights.

    Args:
        options: the trainer's options; `ema_decay` is the largest decay, such as 0.999.
    """

    evaluated = "average"
    restored = False

    def __init__(self, options: TrainerOptions):
        self.options = options
        self._variables: list[tf.Variable] = []
        self._exchange_all = tf.function(self._exchange, autograph=False)
        self._state = tf.Module()
        self._state.averages = []

    @property
    def averages(self) -> list[tf.Variable]:
        """The averages, which are equal to the weights at first."""
        return self._state.averages

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Creates the averages of the first model."""
        if plan.own_train_step:
            raise UsageError(
                "optimizer.ema_decay averages the weights at the end of ctl's own train_step, but this "
                "trainer overrides train_step: override replica_step, or set optimizer.ema_decay=0."
            )
        self._strategy, self._dtype = tf.distribute.get_strategy(), plan.dtype
        self.add_models({"": model})

    def add_models(self, models: Mapping[str, tf_keras.Model]) -> None:
        """Averages the variables of further models, too; earlier averages stay as they are."""
        new = self._find_missing(models.values())
        if not new:
            return
        with self._strategy.scope():
            self.averages.extend([self._create(variable) for variable in new])
        self._variables += new
        # An earlier trace has the earlier variables.
        self._exchange_all = tf.function(self._exchange, autograph=False)

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Checks the variables again after the first steps.

        Raises:
            UsageError: a model was built since `add_models`, for example by a step's trace, or a
                variable that is trained belongs to no model.
        """
        missing = self._find_missing(models.values(), trained)
        if missing:
            raise UsageError(
                f"optimizer.ema_decay cannot average {missing[0].name}, which no model had before the "
                "first step: build every model in the constructor, such as by "
                "self.discriminator.build(input_shape), and make what is trained a part of a model."
            )

    def _find_missing(
        self, models: Iterable[tf_keras.Model], others: Iterable[tf.Variable] = ()
    ) -> list[tf.Variable]:
        """Returns the real and complex variables of built models, and others, that have no average."""
        ids = {id(variable) for variable in self._variables}
        variables = [v for model in models if model.built for v in variables_of(model)]
        variables += others
        unique = {
            id(v): v for v in variables if v.dtype.real_dtype.is_floating and id(v) not in ids
        }
        return list(unique.values())

    def end_step(self, optimizer: Optimizer, applied: tf.Tensor | bool) -> None:
        """Updates the averages, by the moving statistics at the end of the step."""
        dtype = self._dtype
        # 1 - (1 + t) / (10 + t), written so that no bits of a small rate cancel.
        least = tf.constant(1 - self.options.ema_decay, dtype)
        rate = tf.maximum(least, 9 / tf.cast(10 + optimizer.iterations, dtype))
        # In a skipped step the rate is 0 and the averages stay as they are. A conditional would fail:
        # tf.distribute rejects the assignment of a mirrored variable in a conditional of one replica.
        rate = rate if applied is True else tf.where(applied, rate, tf.zeros_like(rate))

        def move(average: tf.Variable, value: Any, rate: tf.Tensor) -> None:
            value = tf.convert_to_tensor(value)
            # average -= rate * (average - value) in one kernel: for small variables the time of an
            # update is the number of kernels.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=average.handle, alpha=tf.cast(rate, value.dtype), delta=average - value
            )

        local, mirrored = self._pairs()
        # Statistics of a replica are averaged on this replica: the mean of averages is the average.
        for average, variable in local:
            move(average, variable, rate)

        def move_mirrored(strategy: tf.distribute.Strategy, rate: Any) -> None:
            for average, variable in mirrored:
                strategy.extended.update(average, move, args=(variable, rate), group=False)

        # Each device updates its own copy, as in tf_keras' optimizers: no value is transferred.
        tf.__internal__.distribute.interim.maybe_merge_call(move_mirrored, self._strategy, rate)

    def exchange(self) -> None:
        """Exchanges weights and averages on every replica, bit for bit."""
        self._exchange_all()

    def state(self) -> dict[str, Any]:
        """Returns the averages."""
        return {AVERAGES: self._state}

    def restart(self, *, keep: Collection[int] = ()) -> None:
        """Sets the averages to the weights, for example after the weights of another run are loaded."""
        with self._strategy.scope():
            for average, variable in zip(self.averages, self._variables, strict=True):
                if id(average) not in keep:
                    average.assign(tf.convert_to_tensor(variable))

    def _create(self, variable: tf.Variable) -> tf.Variable:
        # Placed next to its variable, so that parameter servers spread both alike.
        with self._strategy.extended.colocate_vars_with(variable):
            return tf.Variable(
                tf.convert_to_tensor(variable),
                trainable=False,
                name=f"{AVERAGES}/{variable.name.partition(':')[0]}",
                synchronization=variable.synchronization,
                aggregation=variable.aggregation,
            )

    def _pairs(self) -> tuple[list[Any], list[Any]]:
        """Returns pairs (average, variable): first those with a value per replica, then the others."""
        on_read = tf.VariableSynchronization.ON_READ
        local: list[Any] = []
        mirrored: list[Any] = []
        for pair in zip(self.averages, self._variables, strict=True):
            (local if pair[1].synchronization == on_read else mirrored).append(pair)
        return local, mirrored

    def _exchange(self) -> None:
        def swap(variable: tf.Variable, average: tf.Variable) -> None:
            # Copies: a value that is read after the assignment would be the new one.
            weight, value = tf.identity(variable), tf.identity(average)
            variable.assign(value)
            average.assign(weight)

        local, mirrored = self._pairs()

        def swap_local() -> None:
            for average, variable in local:
                swap(variable, average)

        # Outside of a replica, they read as their mean, which would be assigned to every replica.
        if local:
            self._strategy.run(swap_local)
        for average, variable in mirrored:
            self._strategy.extended.update(variable, swap, args=(average,), group=False)
