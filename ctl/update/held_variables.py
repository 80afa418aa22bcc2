"""Trainable variables outside of the models: which of them the losses depend on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import gc
import logging
from typing import Any
import weakref

import tensorflow as tf
import tf_keras

from ctl.data.source import Nest
from ctl.errors import list_some
from ctl.graphs.assignments import READS, find_assignments, outermost
from ctl.graphs.dataflow import ancestors
from ctl.keras import models
from ctl.keras.precision import Optimizer
from ctl.keras.variables import variables_of
from ctl.rows.trace import symbolic
from ctl.update.gradients import Gradient, optimizers_of
from ctl.update.snapshot import Snapshot, handles

_LOG = logging.getLogger("ctl")
_FIXES = {
    "sample_weight": "multiply the losses by it in per_example_loss",
    "preprocess": "use it in forward or in per_example_loss",
}


class Held(tf_keras.layers.Layer):
    """A variable, layer or module that a trainer holds beside its models, seen as one more model.

    So it is averaged, grouped and compressed as the models are.

    Args:
        value: the variable, layer or `tf.Module`.
    """

    def __init__(self, value: Any):
        super().__init__(name="held")
        self.built = True
        if not isinstance(value, tf_keras.layers.Layer):
            layer = tf_keras.layers.Layer(name="value")  # which a group can freeze
            layer.value = value
            value = layer
        self.inner = value


def trainable_variables_of(value: Any) -> list[tf.Variable]:
    """Returns the trainable variables of an attribute that is no model, optimizer or metric."""
    if models.is_foreign(value):  # a variable of Keras 3
        value = next(iter(models.raw([value])), None)
    if isinstance(value, tf.Variable):
        variables = [value]
    elif isinstance(value, tf_keras.Model) and hasattr(models.inner(value), "fit"):
        return []  # such as a teacher: a model is trained if `minimize` gets its variables
    elif isinstance(value, tf.Module) and not isinstance(value, tf_keras.metrics.Metric):
        variables = value.trainable_variables if getattr(value, "built", True) else []
    else:
        return []
    return [v for v in variables if v.trainable and v.dtype.real_dtype.is_floating]


def find_read(
    candidates: Sequence[tf.Variable],
    compute: Callable[[], Sequence[tf.Tensor]],
    strategy: tf.distribute.Strategy,
) -> list[tf.Variable] | None:
    """Returns the variables that tensors depend on; None without tensors. Call it while tracing.

    Variables that the same code assigns are left out, such as the moving centers of a loss.

    Args:
        candidates: the variables.
        compute: computes the tensors.
        strategy: the strategy of the variables.
    """
    copies = [strategy.experimental_local_results(variable)[0] for variable in candidates]
    snapshot, graph = Snapshot(copies), tf.compat.v1.get_default_graph()
    handles = [graph.capture(copy.handle) for copy in copies]
    # Not by a tape, which tf.init_scope stops: ctl.Step is built in one.
    values = compute()
    if not values:
        return None
    gradients, assigned = tf.gradients(values, handles), snapshot.assigned()
    return [
        variable
        for variable, copy, gradient in zip(candidates, copies, gradients, strict=True)
        if gradient is not None and id(copy) not in assigned
    ]


def build_again(optimizer: Optimizer, variables: Sequence[tf.Variable]) -> None:
    """Makes an optimizer that has not updated anything create its slot variables again."""
    for each in optimizers_of(optimizer):
        names = ("_learning_rate", "_current_learning_rate")
        rates = [getattr(each, name, None) for name in names]
        kept = {id(v) for v in (each.iterations, *rates)}
        each._variables = [v for v in each._variables if id(v) in kept]
        each._built = False
        vars(each).pop("_coalesced_children", None)  # what a checkpoint has seen of the old ones
    optimizer.build(variables)


class Untrained:
    """Names the variables that a loss depends on and that its update does not train.

    Args:
        models: returns the models that are known.

    Attributes:
        elsewhere: models that another step may train, whose variables are not named.
    """

    def __init__(self, models: Callable[[], Sequence[tf_keras.Model]]):
        self._models = models
        self.elsewhere: Sequence[Any] = ()
        self._in_models: set[Any] = set()
        self._found: dict[Any, tf.Variable] = {}
        self._named: list[str] = []
        self._of_hooks: dict[str, list[str]] = {}

    def find(self, tape: tf.GradientTape, trained: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Returns the variables that a tape has watched and that are not trained.

        Those of frozen layers, and those that the code of the step assigns, are left out.
        """
        watched = {_key(v): v for v in tape.watched_variables()}
        others = watched.keys() - _keys(trained)
        if not others:
            return []
        built = [model for model in self._models() if model.built]
        trainable = {key for model in built for key in _keys(model.trainable_variables)}
        self._in_models = {key for model in built for key in _keys(variables_of(model))}
        others -= self._in_models - trainable
        for model in map(models.adapt, self.elsewhere):  # one that only holds models is never built
            built = [layer for layer in model._flatten_layers() if layer.built]
            others -= {key for layer in built for key in _keys(variables_of(layer))}
        for layer in _built_layers():
            # The variable of a frozen layer is still a trainable variable of TensorFlow.
            held = _keys(models.raw(layer.weights))
            others -= held - _keys(models.raw(layer.trainable_weights))
        graph = tf.compat.v1.get_default_graph()
        assigned = {id(each.handle) for each in find_assignments(graph.get_operations())}
        return [v for key, v in watched.items() if key in others and id(v.handle) not in assigned]

    def note(self, variables: Sequence[tf.Variable], gradients: Sequence[Gradient]) -> None:
        """Notes the variables of `find` that have a gradient, for `warn`."""
        pairs = zip(variables, gradients, strict=True)
        self._found.update({_key(v): v for v, gradient in pairs if gradient is not None})

    def warn(self, trained: Iterable[tf.Variable]) -> None:
        """Prints a line for the noted variables that no update of the step trains.

        Args:
            trained: what the updates of the step train, which may follow the loss that reads them.
        """
        others = self._found.keys() - _keys(trained)
        used = [v for key, v in self._found.items() if key in others]
        self._found.clear()
        names = [v.name for v in used]
        if names and names != self._named:
            self._named = names
            if any(_key(v) in self._in_models for v in used):
                fix = (
                    "train a further model by minimize in replica_step, or by a ctl.Step of its own"
                )
            else:
                fix = (
                    "name its model in models= if another ctl.Step trains it, or make it an attribute "
                    "of the trainer or of ctl.Step before the first step"
                )
            _LOG.warning(
                "The loss depends on %s, which the step does not train: %s, or make it a part of the "
                "model. If it must stay as it is, set trainable=False.",
                list_some(names), fix,
            )  # fmt: skip

    def warn_of_hook(self, name: str, tape: tf.GradientTape, results: Nest) -> None:
        """Prints a line for variables outside of the models that the results of a hook depend on.

        The step may train them, by what else the loss reads of them.

        Args:
            name: `sample_weight` or `preprocess`, whose results get no gradient.
            tape: has recorded the hook.
            results: what it returned.
        """
        models = [m for m in self._models() if m.built and not isinstance(m, Held)]
        found = self.find(tape, [v for model in models for v in variables_of(model)])
        names = [v.name for v in found if _flows(v, symbolic(results))]
        if names and names != self._of_hooks.get(name):
            self._of_hooks[name] = names
            _LOG.warning(
                "%s depends on %s, but what it returns gets no gradient, so that the step does not "
                "train %s by it: %s, or set trainable=False.",
                name, list_some(names), list_some(names), _FIXES[name],
            )  # fmt: skip


def _built_layers() -> Iterator[Any]:
    """Yields the built layers among all objects, because nobody knows a model in a closure."""
    is_layer: dict[type, bool] = dict.fromkeys(weakref.ProxyTypes, False)
    for each in gc.get_objects():
        if type(each) not in is_layer:
            is_layer[type(each)] = models.is_layer(each)
        if is_layer[type(each)] and getattr(each, "built", False):
            yield each


def _keys(variables: Iterable[Any]) -> set[Any]:
    return set(map(_key, variables))


def _key(variable: Any) -> Any:
    """Returns what a variable has in common with its wrappers, of mixed precision or of a worker.

    A tape watches the variable inside of them.
    """
    return getattr(variable, "_unique_id", id(variable))


def _flows(variable: tf.Variable, values: Sequence[tf.Tensor]) -> bool:
    """Returns whether floating-point values depend on a variable, except through stop_gradient.

    Their gradient is not computed: the path may have an operation without one.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    stop = {
        id(output)
        for op in operations
        for output in op.outputs
        if op.type == "StopGradient"
        or not (output.dtype.is_floating or output.dtype == tf.resource)
    }
    own = handles([variable])
    tensors = ancestors(*values, stop=stop, through_shapes=False)
    return any(x.op.type in READS and id(outermost(x.op.inputs[0])) in own for x in tensors)
