"""Layers that are frozen until a step: `frozen_until` of `optimizer.groups`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tf_keras

from ctl.errors import UsageError, list_some
from ctl.replica.updates import parameter_groups


class Unfreezing:
    """Sets `trainable` of layers as a function of the step alone, so that a resumed run does the same.

        unfreezing = Unfreezing(groups)
        unfreezing.add_models({"": model})          # once the optimizer has slot variables for them
        unfreezing.steps()                          # [30] if layers are frozen until step 30
        unfreezing.apply(30)                        # from now on these layers are trained

    Args:
        groups: `optimizer.groups`, with every `frozen_until` as a number of steps.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]):
        self._groups = groups
        self._layers: list[tuple[tf_keras.layers.Layer, int]] = []

    def add_models(self, models: Mapping[str, tf_keras.Model]) -> None:
        """Freezes the layers of further models.

        Args:
            models: the models by name, as for `parameter_groups.freeze`.

        Raises:
            UsageError: a group matches only some of a layer's trainable variables, or the variables of
                a layer that is not trainable.
        """
        steps = parameter_groups.frozen_until(models, self._groups)
        if not steps:
            return
        known = {id(layer) for layer, _ in self._layers}  # a model may contain another one
        layers = {
            id(layer): layer
            for model in models.values()
            for layer in model._flatten_layers(include_self=False)
            # Only layers with variables of their own: a container's layers are handled one by one.
            if layer._trainable_weights or layer._non_trainable_weights
        }
        for layer in (layer for key, layer in layers.items() if key not in known):
            variables = (layer.trainable_variables if layer.trainable else []) or layer.variables
            until = {steps.get(id(variable), 0) for variable in variables}
            if until != {0} and not layer.trainable:
                raise UsageError(
                    f"optimizer.groups unfreezes {list_some([v.name for v in variables])}, but the "
                    "trainer sets trainable=False on the layer: leave it trainable in build_model, or "
                    "let no pattern match it."
                )
            if len(until) == 1 and until != {0}:
                self._layers.append((layer, until.pop()))
        self.apply(0)
        trained = [v for model in models.values() for v in model.trainable_variables]
        left = [variable.name for variable in trained if id(variable) in steps]
        if left:
            raise UsageError(
                f"optimizer.groups freezes {list_some(left)}, but other variables of the same layer not "
                "until the same step: a layer can only be frozen as a whole, so let the pattern match "
                "all of them."
            )

    def steps(self) -> list[int]:
        """Returns the steps from which on further layers are trained, in order."""
        return sorted({until for _, until in self._layers})

    def apply(self, step: int) -> None:
        """Freezes and unfreezes the layers for a step."""
        for layer, until in self._layers:
            # The property would also set the layers inside, each of which has its own entry.
            layer._trainable = step >= until

    def describe_phases(self, describe_step: Callable[[], str]) -> str:
        """Describes the steps before and after each change.

        Args:
            describe_step: describes a step, with the layers as they are at the time of the call.
        """
        texts = []
        for step in (0, *self.steps()):
            self.apply(step)
            texts.append(f"from step {step} on: {describe_step()}")
        self.apply(0)
        if len(texts) == 1:
            return texts[0].partition(": ")[2]
        return "; ".join(texts)
