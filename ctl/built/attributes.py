"""The models, optimizers and variables that an object, such as a trainer, holds in its attributes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import logging
from typing import Any, Protocol

import tensorflow as tf
import tf_keras

from ctl.built import preparations
from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError, list_some
from ctl.keras import models
from ctl.keras.precision import Optimizer
from ctl.keras.variables import check_scope, unknown_variables, variables_of
from ctl.update.held_variables import Held, build_again, trainable_variables_of

_LOG = logging.getLogger("ctl")
STATELESS = (
    "its state would come from the rows of the batch before, in training and in evaluations, so that an "
    "update would not be a function of its batch. Leave it out. To continue sequences, make the state a "
    "feature of the batch and pass it as initial_state, or train on longer sequences."
)


class Owner(Protocol):
    """What a step reads of the object whose models it trains: a `StandardTrainer` or a `ctl.Step`."""

    model: tf_keras.Model
    optimizer: Optimizer
    metrics: dict[str, tf_keras.metrics.Metric]
    strategy: tf.distribute.Strategy
    options: TrainerOptions
    global_batch_size: int
    global_step: tf.Variable
    skipped_steps: tf.Variable


class Attributes:
    """Reads the attributes of an object, which may be set at any time.

        attributes = Attributes(trainer)
        attributes.models()                     # trainer.model first, then the others

    Args:
        owner: the object, which may hold further models, optimizers and variables.
        find_read: returns those of some variables that the losses depend on; None if the losses cannot
            be traced.
    """

    def __init__(
        self,
        owner: Owner,
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
    def optimizer(self) -> Optimizer:
        """The optimizer of `model`."""
        return self.owner.optimizer

    @property
    def metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """The metrics of the training loop, by name."""
        return self.owner.metrics

    def optimizers(self) -> list[Optimizer]:
        """Returns every optimizer, also in lists, tuples and dicts."""
        return [v for _, v in self.values() if isinstance(v, tf_keras.optimizers.Optimizer)]

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
            for name, value in self.values()
            if not name.startswith("_self_")
        ]
        new = {
            id(v): v for *_, variables in found for v in variables if id(v) not in self._searched
        }
        if not new:  # without the variables of the models, which are many
            return False
        outside = self._outside_of_models(new)
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

    def _outside_of_models(self, variables: Mapping[int, tf.Variable]) -> list[tf.Variable]:
        in_models = {id(v) for m in self.models() if m.built for v in variables_of(m)}
        return [v for key, v in variables.items() if key not in in_models]

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
        for name, value in self.values():
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
        taken, named = {"loss", "examples", *losses, *names}, dict[str, tf_keras.metrics.Metric]()
        for layer in self.layers():
            for metric in layer._metrics:
                if not any(metric is each for each in named.values()):
                    is_free = metric.name not in taken and metric.name not in named
                    named[metric.name if is_free else f"{layer.name}_{metric.name}"] = metric
        return named

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

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yields the values of the attributes, as "name/index", also in lists, tuples and dicts."""
        for name, value in vars(self.owner).items():
            values: Sequence[Any] = [value]
            if isinstance(value, list | tuple | dict):
                values = tf.nest.flatten(value)
            for i, each in enumerate(values):
                yield f"{name}/{i}", models.adapt(each)

    def _other_models(self) -> Iterator[tuple[str, tf_keras.Model]]:
        """Yields the models of a subclass besides `model`, each with a name that does not change."""
        for name, value in self.values():
            if isinstance(value, tf_keras.Model) and value is not self.model:
                yield name, value


def freezing(layer: tf_keras.layers.Layer) -> tuple[bool, Sequence[str]]:
    """Returns what is frozen in a layer, on which a trace depends."""
    # In Keras 3 a single variable can be frozen.
    return layer.trainable, getattr(layer, "frozen_variables", ())


def check_stateless(model: tf_keras.layers.Layer) -> None:
    """Raises a UsageError if a layer carries the state of one batch's rows to the next batch."""
    for layer in model._flatten_layers():
        own = models.inner(layer)
        if getattr(own, "stateful", False) and not isinstance(own, tf_keras.Model):
            raise UsageError(f"Layer {layer.name} has stateful=True: {STATELESS}")
