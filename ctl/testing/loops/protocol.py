"""The interface that `assert_loop_equivalent` requires of a training loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing.nested import named_leaves, unwrap
from ctl.testing.recording import Name
from ctl.testing.splits import Split

_STATISTICS = ("moving_mean", "moving_variance")


class LoopSplit(Split):
    """A split of a loop, whose micro-batches are not known."""

    def __str__(self) -> str:
        """Returns, for example, `2 replicas (3 + 2 rows)`."""
        return self.replica_rows


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


class Contents:
    """The variables, models, optimizers and metrics of a loop, without repetitions.

    Args:
        variables: the `variables` of a loop; may be nested lists and dicts, or a method.

    Raises:
        UsageError: an object has no variables.
    """

    def __init__(self, variables: Any):
        items = [item for _, item in named_leaves(unwrap(variables))]
        self.items = list({id(item): item for item in items}.values())
        for item in self.items:
            if not has_variables(item) and not hasattr(_value(item), "assign"):
                raise UsageError(
                    f"variables of the loop contains {type(item).__name__}, which has no "
                    "variables: give models, optimizers, metrics and variables."
                )

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, and those that they wrap for a loss scale."""
        outer = [item for item in self.items if hasattr(item, "apply_gradients")]
        inner = [getattr(item, "inner_optimizer", None) for item in outer]
        return [item for item in (*outer, *inner) if item is not None]

    @property
    def metrics(self) -> list[Any]:
        """The metrics, those of compiled models included."""
        models = [item for item in self.items if hasattr(item, "compute_loss")]
        nested = [metric for model in models for metric in getattr(model, "metrics", [])]
        own = [item for item in self.items if hasattr(item, "update_state")]
        return list({id(item): item for item in (*own, *nested)}.values())

    @property
    def layers(self) -> list[Any]:
        """All layers of the models."""
        models = [item for item in self.items if hasattr(item, "_flatten_layers")]
        return [layer for model in models for layer in model._flatten_layers()]

    def name_variables(self) -> dict[Name, tf.Variable]:
        """Names each numeric variable by its kind and its own name, in a fixed order."""
        named: dict[Name, tf.Variable] = {}
        ids: set[int] = set()
        for kind, item in self._each_variable():
            variable = _value(item)
            numeric = variable.dtype.is_floating or variable.dtype.is_integer
            if id(variable) in ids or not numeric:
                continue
            ids.add(id(variable))
            own_name = getattr(item, "path", None) or variable.name
            name, count = own_name, 2
            while (kind, name) in named:
                name, count = f"{own_name}#{count}", count + 1
            named[kind, name] = variable
        return named

    def _each_variable(self) -> Iterator[tuple[str, Any]]:
        for item in self.items:
            if not has_variables(item):
                yield _kind(item), item
            elif hasattr(item, "update_state"):
                yield from (("metric", v) for v in _call(item.variables))
            elif hasattr(item, "apply_gradients"):
                yield from (("state", v) for v in _call(item.variables))
                scale: Any = getattr(item, "_loss_scale", None)  # in tf_keras, not in `variables`
                if isinstance(getattr(scale, "current_loss_scale", None), tf.Variable):
                    yield from (("state", v) for v in (scale.current_loss_scale, scale.counter))
            else:
                yield from ((_kind(v), v) for v in _call(item.variables))
                for metric in getattr(item, "metrics", []):  # from compile(), not in `variables`
                    yield from (("metric", v) for v in _call(metric.variables))


def has_variables(item: Any) -> bool:
    """Returns whether an object is a model, layer, optimizer or metric, built or not."""
    # The property of a model that is not built raises an error.
    return hasattr(type(item), "variables") or "variables" in getattr(item, "__dict__", {})


def _call(variables: Any) -> Iterable[Any]:
    return list(variables() if callable(variables) else variables)


def _value(variable: Any) -> Any:
    """Returns the variable of TensorFlow in a variable of Keras 3."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def _kind(variable: Any) -> str:
    name = getattr(variable, "path", None) or variable.name
    if any(statistic in name for statistic in _STATISTICS):
        return "statistic"
    return "update" if variable.trainable else "state"
