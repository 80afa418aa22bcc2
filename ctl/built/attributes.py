"""The models, optimizers and variables that an object, such as a trainer, holds in its attributes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import logging
import pkgutil
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built import preparations
from ctl.errors import UsageError, list_some
from ctl.keras import models, precision
from ctl.keras.variables import (
    check_scope,
    moving_statistics,
    unknown_variables,
    variables_of,
)
from ctl.update.held_variables import Held, build_again, trainable_variables_of
from ctl.update.snapshot import Assignable

_LOG = logging.getLogger("ctl")
_STATE_DICT = "ctl.built.state_dicts:StateDict"  # imported for an object that has one
STATELESS = (
    "its state would come from the rows of the batch before, in training and in evaluations, so that an "
    "update would not be a function of its batch. Leave it out. To continue sequences, make the state a "
    "feature of the batch and pass it as initial_state, or train on longer sequences."
)


class Attributes:
    """Reads the attributes of an object, which may be set at any time.

        attributes = Attributes(trainer)
        attributes.models()                     # trainer.model first, then the others

    Args:
        owner: holds `model`, `optimizer`, `metrics`, `global_step` and `skipped_steps`, and possibly
            more models, optimizers and variables: a `StandardTrainer`.
        find_read: returns those of some variables that the losses depend on; None if the losses cannot
            be traced.
    """

    def __init__(
        self,
        owner: Any,
        find_read: Callable[[Sequence[tf.Variable]], list[tf.Variable] | None] = lambda _: [],
    ):
        self.owner = owner
        self._find_read = find_read
        # Attributes that are no models, and are trained with `model`.
        self._held: dict[str, Held] = {}
        self._searched: set[int] = set()
        self._keyed: set[str] = set()

    @property
    def model(self) -> tf_keras.Model:
        """The model that `optimizer` updates."""
        return self.owner.model

    @property
    def optimizer(self) -> Any:
        """The optimizer of `model`."""
        return self.owner.optimizer

    @property
    def metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """The metrics of the training loop, by name."""
        return self.owner.metrics

    def has_loss_scale(self) -> bool:
        """Returns whether an optimizer, of any model, has a loss scale."""
        return any(map(precision.has_loss_scale, self.optimizers()))

    def optimizers(self) -> list[Any]:
        """Returns every optimizer, also in lists, tuples and dicts."""
        return [v for _, v in self._values() if isinstance(v, tf_keras.optimizers.Optimizer)]

    def models(self) -> list[tf_keras.Model]:
        """Returns every model, also in lists, tuples and dicts; `trainer.model` is the first."""
        return list(self.named_models().values())

    def named_models(self) -> dict[str, tf_keras.Model]:
        """Returns every model by its attribute, as "name/index"; `trainer.model` is the first, as "".

        What is trained with it is seen as further models, such as a variable that the loss reads.
        """
        # Excludes TensorFlow's own records of the attributes, which hold the same models.
        others = {k: m for k, m in self._other_models() if not k.startswith("_self_")}
        return {"": self.model, **others, **self._held}

    def trained_variables(self) -> list[tf.Variable]:
        """Returns the variables that the step trains, unless `minimize` gets others."""
        held = [v for each in self._held.values() for v in each.trainable_variables]
        return [*self.model.trainable_variables, *held] if held else self.model.trainable_variables

    def find_held(self, *, final: bool = False) -> bool:
        """Finds variables outside of models that the losses read; returns whether there are new ones.

        They may be set at any time before the first update.

        Args:
            final: whether losses that cannot be traced now are not tried again.
        """
        found = [
            (name, value, trainable_variables_of(value))
            for name, value in self._values()
            if not name.startswith("_self_")
        ]
        new = {
            id(v): v for *_, variables in found for v in variables if id(v) not in self._searched
        }
        if not new:  # without the variables of the models, which are many
            return False
        in_models = {id(v) for m in self.models() if m.built for v in variables_of(m)}
        outside = [v for key, v in new.items() if key not in in_models]
        read = self._find_read(outside) if outside else []
        # A loss may need attributes that a subclass sets after the constructor.
        self._searched |= new.keys() if final or read is not None else set()
        ids = {id(variable) for variable in read or ()}
        for name, value, variables in found:
            if any(id(v) in ids for v in variables):
                self._held[name] = Held(value)
                ids -= {id(v) for v in variables}  # of an attribute that holds the same variable
        if read:
            _LOG.warning(
                "The optimizer also trains what the losses read outside of the model, %s: set "
                "trainable=False where your own code assigns the values.",
                list_some([v.name for v in read]),
            )
        return bool(read)

    def add_held(self) -> None:
        """Lets the optimizer train what `find_held` finds.

        Raises:
            UsageError: a variable was set too late, or outside of the strategy's scope.
        """
        if not self.find_held(final=True):
            return
        variables, optimizer = self.trained_variables(), self.optimizer
        if optimizer.iterations > 0:
            raise UsageError(
                f"{list_some(unknown_variables(optimizer, variables))}, which the loss reads, became an "
                "attribute after the first update: set it in the constructor or in build_model."
            )
        check_scope(variables, self.owner.strategy)
        with self.owner.strategy.scope():
            build_again(optimizer, variables)

    def parameter_count(self) -> int:
        """Returns the number of parameters of all models."""
        # A model may contain another one, and a model that is not built yet has no parameters.
        weights = {id(v): v for model in self.models() if model.built for v in variables_of(model)}
        return sum(variable.shape.num_elements() for variable in weights.values())

    def key_new_models(self, seed: int) -> None:
        """Prepares the layers of models that a subclass created since the last call.

        Args:
            seed: the seed of the run.

        Raises:
            UsageError: an attribute is an object of Keras 3.
        """
        for name, value in self._values():
            is_public = not name.startswith("_self_")  # TensorFlow's own records of the attributes
            if is_public and (models.is_foreign(value) or isinstance(value, tf_keras.Model)):
                models.check(value, f"self.{name.partition('/')[0]} is")
        for name, model in self._other_models():
            if name not in self._keyed:
                check_stateless(model)
                preparations.prepare(model, seed, scope=name)
                self._keyed.add(name)

    def layers(self) -> list[tf_keras.layers.Layer]:
        """Returns every layer of every model, and the models themselves."""
        return [layer for model in self.models() for layer in model._flatten_layers()]

    def layer_metrics(self, names: Iterable[str] = ()) -> dict[str, tf_keras.metrics.Metric]:
        """Returns the metrics that layers update themselves, by their names in the results.

        A name begins with the layer's where it is necessary.

        Args:
            names: the names of the other metrics.
        """
        losses = [f"{name}_loss" for name in self.owner.options.loss_weights]
        taken, named = {"loss", "examples", *losses, *names}, dict[str, Any]()
        for layer in self.layers():
            for metric in layer._metrics:
                if not any(metric is each for each in named.values()):
                    is_free = metric.name not in taken and metric.name not in named
                    named[metric.name if is_free else f"{layer.name}_{metric.name}"] = metric
        return named

    def assignable(self) -> Assignable:
        """Returns every variable that the code of a step may assign.

        Only optimizers assign their own variables, and ctl counts the steps.
        """
        counters = {id(self.owner.global_step), id(self.owner.skipped_steps)}
        variables: dict[int, tf.Variable] = {}
        statistics: set[int] = set()
        plain: set[int] = set()
        for _, value in self._values():
            if isinstance(value, tf.Variable):
                variables[id(value)] = value
            elif isinstance(value, tf.Module) and _is_built(value):
                variables |= {id(variable): variable for variable in variables_of(value)}
                if isinstance(value, tf_keras.layers.Layer):
                    statistics |= moving_statistics(value)
                    plain |= moving_statistics(value, plain=True)
        variables |= {id(v): v for m in self.layer_metrics().values() for v in m.variables}
        once, summed = [], []
        for key, variable in variables.items():
            if key in statistics or _is_sum(variable):
                summed.append(variable)
            elif key not in counters:
                once.append(variable)
        return Assignable(once, summed, [v for key, v in variables.items() if key in plain])

    def state(self) -> list[tf.Variable]:
        """Returns what `assignable` does, without metrics, which every loop and evaluation resets."""
        metrics = [v for _, v in self._values() if isinstance(v, tf_keras.metrics.Metric)]
        metrics += self.layer_metrics().values()
        reset = {id(variable) for metric in metrics for variable in metric.variables}
        held = self.assignable()
        return [v for v in (*held.once, *held.summed) if id(v) not in reset]

    def check_slot_variables(self) -> None:
        """Raises UsageError if the optimizer has no slot variables for a trainable variable."""
        trained = self.trained_variables()
        unknown = unknown_variables(self.optimizer, trained)
        if unknown and len(unknown) == len(trained):
            raise UsageError(
                f"The optimizer has slot variables of another model, and none for {list_some(unknown)}: "
                "make an optimizer for each trainer or ctl.Step."
            )
        if unknown:
            raise UsageError(
                f"{list_some(unknown)} became trainable after the trainer was built, so the optimizer "
                "has no slot variables for them: leave these layers trainable in build_model, and set "
                "trainable by self.global_step.numpy() in train_loop_begin; or train them in a second "
                "run, which starts from this one by init.checkpoint."
            )

    def overrides(self, name: str) -> bool:
        """Returns whether a subclass overrides a method of `StandardTrainer`."""
        return getattr(type(self.owner), name).__module__ != "ctl.trainer"

    def penalties(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Returns the regularization losses of the layers that hold some of the variables.

        Args:
            variables: the variables that an update trains, of any model.
        """
        keys = {id(variable) for variable in variables}
        layers = {id(layer): layer for layer in self.layers()}
        losses: list[tf.Tensor] = []
        functions: dict[int, Any] = {}
        for layer in layers.values():  # each once, even if several models contain it
            own = (*layer._trainable_weights, *layer._non_trainable_weights)
            if any(id(variable) in keys for variable in own):
                losses += [*(layer._eager_losses or layer._losses)]
                for loss in layer._callable_losses:
                    # In Keras 3 every layer that holds a variable has its penalty.
                    shared = isinstance(loss.args[0], tf.Variable)
                    functions[id(loss.args[0] if shared else loss)] = loss
        return [*losses, *(loss() for loss in functions.values())]

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns every model, optimizer, variable and object with a `state_dict`, by its attribute."""
        trackable = tf.__internal__.tracking.Trackable
        function = tf.types.experimental.PolymorphicFunction
        stateless = (tf_keras.metrics.Metric, tf.data.Dataset, tf.data.Iterator, function)
        # Every loop resets these, or makes them again from `global_step`.
        excluded = ("metrics", "_train_dataset", "_train_iter", "_train_loop_fn")
        values = {name: as_entry(name, value) for name, value in vars(self.owner).items()}
        return {
            name: _adapt_all(value)
            for name, value in values.items()
            if isinstance(value, trackable)
            and not isinstance(value, stateless)
            and name not in excluded
            and not name.startswith("_self_")
        }

    def _other_models(self) -> Iterator[tuple[str, tf_keras.Model]]:
        """Yields the models of a subclass besides `model`, each with a name that does not change."""
        for name, value in self._values():
            if isinstance(value, tf_keras.Model) and value is not self.model:
                yield name, value

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yields the values of the attributes, as "name/index", also in lists, tuples and dicts."""
        for name, value in vars(self.owner).items():
            values: Sequence[Any] = [value]
            if isinstance(value, list | tuple | dict):
                values = tf.nest.flatten(value)
            for i, each in enumerate(values):
                yield f"{name}/{i}", models.adapt(each)


def freezing(layer: tf_keras.layers.Layer) -> Any:
    """Returns what is frozen in a layer, on which a trace depends."""
    # In Keras 3 a single variable can be frozen.
    return layer.trainable, getattr(layer, "frozen_variables", ())


def as_entry(name: str, value: Any) -> Any:
    """Returns an object with `state_dict` as an entry of a checkpoint, and any other as it is."""
    is_state = not isinstance(value, type | tf.__internal__.tracking.Trackable) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )
    return pkgutil.resolve_name(_STATE_DICT)(name, value) if is_state else value


def _adapt_all(value: Any) -> Any:
    """Returns an attribute with the adapters of models of Keras 3, also in a list, tuple or dict."""
    if isinstance(value, list | tuple | dict):
        each = tf.nest.flatten(value)
        adapted = [models.adapt(v) for v in each]
        if any(one is not two for one, two in zip(each, adapted, strict=True)):
            packed = tf.nest.pack_sequence_as(value, adapted)
            return tf.__internal__.tracking.wrap(packed)
        return value
    return models.adapt(value)


def check_stateless(model: tf_keras.layers.Layer) -> None:
    """Raises a UsageError if a layer carries the state of one batch's rows to the next batch."""
    for layer in model._flatten_layers():
        own = models.inner(layer)
        if getattr(own, "stateful", False) and not isinstance(own, tf_keras.Model):
            raise UsageError(f"Layer {layer.name} has stateful=True: {STATELESS}")


def _is_built(module: tf.Module) -> bool:
    return module.built if isinstance(module, tf_keras.Model) else True


def _is_sum(variable: tf.Variable) -> bool:
    """Returns whether each replica holds a part of a sum, as the variables of metrics do."""
    return (
        variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
