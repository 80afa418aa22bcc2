"""The models, optimizers and variables that a trainer holds in its attributes."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError, list_some
from ctl.replica import dropout, keras_version


class TrainerAttributes:
    """Reads the attributes of a trainer, which a subclass may set at any time.

    attributes = TrainerAttributes(trainer)
    attributes.models()                     # trainer.model first, then the others
    """

    def __init__(self, trainer: Any):
        """Keeps the trainer.

        Args:
            trainer: the `StandardTrainer`.
        """
        self._trainer = trainer
        self._keyed: set[str] = set()

    def models(self) -> list[tf_keras.Model]:
        """Returns every model, also those in lists and dicts; `trainer.model` is the first."""
        return [self._trainer.model, *(model for _, model in self._other_models())]

    def parameter_count(self) -> int:
        """Returns the number of parameters of all models."""
        # A model may contain another one, and a model that is not built yet has no parameters.
        weights = {id(v): v for model in self.models() if model.built for v in model.weights}
        return sum(variable.shape.num_elements() for variable in weights.values())

    def key_new_models(self, seed: int) -> None:
        """Keys the random layers of models that a subclass created since the last call.

        Args:
            seed: the seed of the run.

        Raises:
            UsageError: an attribute is an object of Keras 3.
        """
        for name, value in self._values():
            is_public = not name.startswith("_self_")  # TensorFlow's own records of the attributes
            if is_public and (keras_version.is_keras3(value) or isinstance(value, tf_keras.Model)):
                keras_version.check_tracked(value, f"self.{name.partition('/')[0]} is")
        for name, model in self._other_models():
            if name not in self._keyed:
                dropout.key_random_layers(model, seed, scope=name)
                self._keyed.add(name)

    def trainable(self) -> tuple[bool, ...]:
        """Returns whether each layer of every model is trainable."""
        return tuple(
            layer.trainable for model in self.models() for layer in model._flatten_layers()
        )

    def check_slot_variables(self) -> None:
        """Raises UsageError if the optimizer has no slot variables for a trainable variable."""
        optimizer = self._trainer.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        unknown = [
            variable.name
            for variable in self._trainer.model.trainable_variables
            if optimizer._var_key(variable) not in optimizer._index_dict
        ]
        if unknown:
            raise UsageError(
                f"{list_some(unknown)} became trainable after the trainer was built, so the optimizer "
                "has no slot variables for them: leave these layers trainable in build_model, and set "
                "trainable by self.global_step.numpy() in train_loop_begin; or train them in a second "
                "run, which starts from this one by init.checkpoint."
            )

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns every model, optimizer and variable, by the attribute's name."""
        trackable = tf.__internal__.tracking.Trackable
        stateless = (tf_keras.metrics.Metric, tf.data.Dataset, tf.data.Iterator)
        # Reset by every loop, or made again from `global_step`.
        excluded = ("metrics", "_train_dataset", "_train_iter", "_train_loop_fn")
        return {
            name: value
            for name, value in vars(self._trainer).items()
            if isinstance(value, trackable)
            and not isinstance(value, stateless)
            and name not in excluded
            and not name.startswith("_self_")
        }

    def _other_models(self) -> Iterator[tuple[str, tf_keras.Model]]:
        """The models that a subclass holds besides `model`, each with a name that does not change."""
        for name, value in self._values():
            if isinstance(value, tf_keras.Model) and value is not self._trainer.model:
                yield name, value

    def _values(self) -> Iterator[tuple[str, Any]]:
        """The values of the attributes, also those in lists and dicts, as "name/index"."""
        for name, value in vars(self._trainer).items():
            values: Sequence[Any] = [value]
            if isinstance(value, list | dict):
                values = tf.nest.flatten(value)
            for i, each in enumerate(values):
                yield f"{name}/{i}", each
