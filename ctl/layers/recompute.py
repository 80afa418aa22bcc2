"""Recomputes activations in the backward pass, instead of keeping them.

The method is of Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174.
`tf.recompute_grad` runs the code of the forward pass a second time, which draws other dropout masks,
moves moving statistics twice, and loses the training flag and masks of tf_keras. Here the second pass
replays the first one.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fnmatch
import functools
import itertools
import types
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.error_location import user_frame
from ctl.data.autograph import convert
from ctl.data.source import Nest
from ctl.errors import UsageError
from ctl.graphs import ops, order, passes
from ctl.graphs.assignments import READS, find_assignments, outermost
from ctl.keras import models
from ctl.keras.private import autocast_variable, base_layer_utils
from ctl.private.tensorflow import record
from ctl.rows import row_mask

# Of all recomputation; the equivalence kit compares both.
_SWITCH = types.SimpleNamespace(enabled=True, used=False)


def recompute(layer_or_function: Any, *, blocks: str = "") -> Any:
    """Keeps no activations of a layer or function; the backward pass computes them again.

        x = ctl.recompute(tf_keras.layers.Dense(256))(x)
        x = ctl.recompute(lambda x: tf.nn.gelu(x @ kernel))(x)
        model = ctl.recompute(tf_keras.applications.ResNet50(), blocks="*_out")

    The activations exist only while the backward pass of the layer or function runs; its inputs are
    kept. The gradient is the same as without it: the second pass draws the same random numbers, uses the
    same statistics in `ctl.SyncBatchNormalization`, and does not repeat the updates and losses that
    layers add. It has an effect in the steps of a trainer, and none in evaluation, export, and eager
    execution.

    Args:
        layer_or_function: a tf_keras layer or model, which is changed in place and keeps its variables,
            names and checkpoints; or a function of tensors, with any arguments.
        blocks: for a functional model, a pattern of the names of the layers that end its blocks. Each
            block is recomputed by itself, so that the inputs of all blocks are kept, and the
            activations of one exist at a time.

    Returns:
        The same layer, or a function with the arguments of the given one.

    Raises:
        UsageError: it is not a layer or a function, or the model has no such blocks. While the step is
            traced: the code assigns a variable other than by `add_update`, or reads one that it
            assigned, or draws random numbers that cannot be repeated.
    """
    if blocks:
        return _recompute_blocks(layer_or_function, blocks)
    layer = models.inner(layer_or_function)
    if models.is_layer(layer):
        if not hasattr(layer.call, "ctl_recomputes"):
            owner = None if "call" in vars(layer) else layer
            # Keras' own __setattr__ would track the function as an attribute of the layer.
            object.__setattr__(layer, "call", _wrap(layer.call, f"Layer {layer.name}", owner))
        return layer_or_function
    if not callable(layer_or_function):
        raise UsageError(
            f"ctl.recompute got {type(layer_or_function).__name__}, but requires a tf_keras layer or a "
            "function."
        )
    name = getattr(layer_or_function, "__name__", type(layer_or_function).__name__)
    return _wrap(layer_or_function, f"Function {name}")


def _recompute_blocks(model: tf_keras.Model, pattern: str) -> tf_keras.Model:
    """Makes a functional model call its blocks one after the other, and recompute each."""
    if not getattr(model, "_is_graph_network", False):
        raise UsageError(
            f"ctl.recompute(..., blocks={pattern!r}) requires a functional or Sequential model of "
            "tf_keras: wrap the blocks of other models by themselves."
        )
    # Not `layer.output`, which for a model inside of the model is a tensor of that model.
    layers = [layer for layer in model.layers if fnmatch.fnmatchcase(layer.name, pattern)]
    ends = [layer.get_output_at(0) for layer in layers]
    if not ends:
        raise UsageError(f"ctl.recompute got blocks={pattern!r}, but no layer has such a name.")
    if ends[-1] is not model.output:
        ends.append(model.output)
    try:
        # Models of the same layers. The given model does not hold them, so that names and checkpoints
        # stay the same.
        parts = [
            recompute(tf_keras.Model(start, end))
            for start, end in itertools.pairwise([model.input, *ends])
        ]
    except ValueError:
        raise UsageError(
            f"The layers that match blocks={pattern!r} do not divide {model.name} into consecutive "
            "blocks: choose layers through whose output alone the later layers depend on the earlier "
            "ones."
        ) from None

    def call(inputs: Nest, training: bool | None = None, mask: tf.Tensor | None = None) -> Nest:
        for part in parts:
            inputs = part(inputs, training=training)
        return inputs

    object.__setattr__(model, "call", call)
    return model


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Makes steps that are traced inside of the `with` block keep all activations."""
    enabled, _SWITCH.enabled = _SWITCH.enabled, False
    try:
        yield
    finally:
        _SWITCH.enabled = enabled


@contextlib.contextmanager
def detect_use() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether a step that was traced inside recomputes anything."""
    _SWITCH.used = False
    yield lambda: _SWITCH.used


def _wrap(function: Callable[..., Any], name: str, owner: Any = None) -> Callable[..., Any]:
    """Returns a function that recomputes `function`, the `call` of the owner's class if there is one."""

    # Without `__module__`, by which AutoGraph decides what to convert: this wrapper is not converted.
    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        # The class of a layer may have changed since, by `convert_sync_batch_norm`.
        converted = convert(function if owner is None else type(owner).call.__get__(owner))
        rows = row_mask.current()
        in_training = rows is not None and rows.graph is not None and rows.earlier is None
        # In a loop or a branch TensorFlow itself derives the gradient, from the graph.
        if not (_SWITCH.enabled and in_training) or tf.executing_eagerly():
            return converted(*args, **kwargs)
        assert rows is not None
        if tf.compat.v1.get_default_graph() is not rows.graph:
            return converted(*args, **kwargs)
        return _Call(converted, name, rows, (args, kwargs)).run()

    call.ctl_recomputes = True  # type: ignore[attr-defined]
    return call


class _Call:
    """One call of a recomputed function in a step."""

    def __init__(
        self, function: Callable[..., Any], name: str, rows: row_mask.Rows, arguments: Any
    ):
        self._function, self._name, self._rows, self._arguments = function, name, rows, arguments
        self._calls = dict(rows.calls)  # the numbers of the draws so far
        self._keras = _KerasState()
        self._values: list[Any] = []
        self._flat = tf.nest.flatten(arguments, expand_composites=True)
        self._places = [i for i, value in enumerate(self._flat) if tf.is_symbolic_tensor(value)]
        self._inputs = [self._flat[i] for i in self._places]
        # tf_keras attaches the mask of a sequence to its tensor.
        self._masks = [getattr(tensor, "_keras_mask", None) for tensor in self._inputs]
        self._start = len(rows.graph.get_operations())

    def run(self) -> Nest:
        """Runs the first pass, and records on the tapes how its gradient is computed."""
        _SWITCH.used = True
        args, kwargs = self._arguments
        with (
            record.VariableWatcher() as watcher,
            passes.Pass(self._values, replays=False).entered(),
        ):
            outputs = self._function(*args, **kwargs)
        created = self._rows.graph.get_operations()[self._start :]
        self._variables = list(watcher.watched_variables())
        self._captured = _find_captured(created, self._inputs)
        flat = tf.nest.flatten(outputs, expand_composites=True)
        self._outputs = [i for i, value in enumerate(flat) if tf.is_symbolic_tensor(value)]
        results = list(flat)
        # The tapes recorded the first pass, too: the gradient of a loss that a layer adds flows through
        # it. The gradient of the outputs does not, because these tensors are not connected to it.
        with record.stop_recording():
            for i in self._outputs:
                results[i] = tf.identity(flat[i])
                if getattr(flat[i], "_keras_mask", None) is not None:
                    results[i]._keras_mask = flat[i]._keras_mask
        with autocast_variable.enable_auto_cast_variables(None):
            reads = [tf.convert_to_tensor(variable) for variable in self._variables]
        record.record_operation(
            "CtlRecompute",
            [results[i] for i in self._outputs],
            [*self._inputs, *self._captured, *reads],
            self._gradients,
        )
        return tf.nest.pack_sequence_as(outputs, results, expand_composites=True)

    def _gradients(self, *d_outputs: tf.Tensor) -> list[tf.Tensor]:
        """Runs the second pass; returns the gradients by inputs, captured tensors and variables."""
        graph = self._rows.graph
        start = len(graph.get_operations())
        # Without an order, the passes would be merged into one, or run one right after the other.
        with (
            order.run_after(d_outputs, self._inputs, compiled=self._rows.compiled) as inputs,
            row_mask.replay(self._rows, dict(self._calls)),
        ):
            with tf.GradientTape() as tape:
                sources = [x for x in (*inputs, *self._captured) if _is_differentiable(x)]
                tape.watch(sources)
                outputs = self.replay_forward_pass(inputs)
            operations = graph.get_operations()
            _check_second_pass(self._name, operations[self._start : start], operations[start:])
            flat = tf.nest.flatten(outputs, expand_composites=True)
            pairs = [
                (flat[i], d)
                for i, d in zip(self._outputs, d_outputs, strict=True)
                if d is not None and _is_differentiable(flat[i])
            ]
            computed = tape.gradient(
                [output for output, _ in pairs],
                [*sources, *self._variables],
                output_gradients=[d for _, d in pairs],
            )
        gradients = {id(x): gradient for x, gradient in zip(sources, computed, strict=False)}
        by_tensor = [gradients.get(id(x)) for x in (*inputs, *self._captured)]
        return [*by_tensor, *computed[len(sources) :]]

    def replay_forward_pass(self, inputs: Sequence[tf.Tensor]) -> Nest:
        """Runs the function again; `draws` recognizes this method by its name."""
        flat = list(self._flat)
        for place, value, mask in zip(self._places, inputs, self._masks, strict=True):
            flat[place] = value
            if mask is not None:
                value._keras_mask = mask
        args, kwargs = tf.nest.pack_sequence_as(self._arguments, flat, expand_composites=True)
        with self._keras.restored(), passes.Pass(self._values, replays=True).entered():
            return self._function(*args, **kwargs)


class _KerasState:
    """The state of Keras while it calls layers: the training flag, and the dtype of variables."""

    def __init__(self) -> None:
        context = base_layer_utils.call_context()
        self._in_call, self._state = context.in_call, context._state
        self._dtype = getattr(autocast_variable._autocast_dtype, "dtype", None)
        self._others = [package.CallState() for package in models.imported()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        context = base_layer_utils.call_context()
        current = context.in_call, context._state
        context.in_call, context._state = self._in_call, self._state
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(autocast_variable.enable_auto_cast_variables(self._dtype))
                for other in self._others:
                    stack.enter_context(other.restored())
                yield
        finally:
            context.in_call, context._state = current


def _find_captured(operations: Sequence[Any], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors from outside, other than arguments, that a gradient may flow to."""
    inside = {op.name for op in operations}
    known = {id(tensor) for tensor in inputs}
    tensors = {}
    for op in operations:
        for tensor in op.inputs:
            if tensor.op.name not in inside and id(tensor) not in known:
                tensors[id(tensor)] = tensor
    return [
        tensor
        for tensor in tensors.values()
        if _is_differentiable(tensor) and record.should_record_backprop([tensor])
    ]


def _is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient can flow through a tensor."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _matters(read: tf.Operation) -> bool:
    """Returns whether the outputs may depend on a read.

    A fused batch normalization reads the moving statistics only to compute new ones.
    """
    consumers = [op for output in read.outputs for op in output.consumers()]
    return not all(
        op.type.startswith("FusedBatchNorm") and op.get_attr("is_training") for op in consumers
    )


def _check_second_pass(
    name: str, first: Sequence[tf.Operation], second: Sequence[tf.Operation]
) -> None:
    """Raises a UsageError if the second pass cannot be the same as the first.

    Args:
        name: what is recomputed, for the message.
        first: the operations from the beginning of the first pass to the beginning of the second.
        second: the operations of the second pass.
    """
    twice = (
        "assigns a variable, which would happen twice: assign it in self.add_update(lambda: ...) of a "
        "layer, or outside"
    )
    found = [(assignment.op, twice) for assignment in find_assignments(second)]
    assigned = {id(assignment.handle) for assignment in find_assignments(first)}
    for op in ops.with_called(second):
        if op.type in ops.RANDOM and op.type not in ops.STATELESS:
            problem = "that cannot be drawn again: use ctl.random, or draw them outside"
            found.append((op, f"draws random numbers ({op.type}) {problem}"))
        if op.type in READS and id(outermost(op.inputs[0])) in assigned and _matters(op):
            problem = "so its second value would differ: read it outside"
            found.append((op, f"reads a variable that it has assigned before, {problem}"))
    for op, problem in found:
        line = user_frame([(frame.filename, frame.lineno) for frame in op.traceback])
        raise UsageError(f"{f'{line}: ' if line else ''}{name} in ctl.recompute {problem}.")
