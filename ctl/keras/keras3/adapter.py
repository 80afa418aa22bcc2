"""Shows a layer or model of Keras 3 as a tf_keras model with the same tf.Variables."""

from collections.abc import Callable, Iterable, Iterator
import functools
import threading
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs import passes
from ctl.hardware import strategies
from ctl.keras import precision
from ctl.keras.keras3 import batch_norm, detection, private
from ctl.keras.models import Adapted, raw
from ctl.rows import row_mask

# What tf_keras.Model defines, but the layer of Keras 3 answers.
_DELEGATED = (
    "activity_regularizer", "compute_dtype", "count_params", "dtype", "dtype_policy", "export",
    "get_config", "get_layer", "get_weights", "input", "input_shape", "inputs", "layers",
    "load_weights", "losses", "output", "output_shape", "outputs", "predict", "save_weights",
    "set_weights", "summary", "supports_masking", "variable_dtype",
)  # fmt: skip


def prepare(layer: Any) -> None:
    """Prepares a layer or model and the layers inside of it to be trained, those that are new.

    Raises:
        UsageError: a layer holds a metric or a tf.Variable.
    """
    for each in [layer, *private.layers_of(layer, recursive=True)]:
        _check_contents(each)
        if not isinstance(private.losses_of(each), _LossesOfThread):
            private.set_losses(each, _LossesOfThread())
        batch_norm.prepare(each)
    _describe_variables(layer, "")


def _check_contents(layer: Any) -> None:
    for metric in private.own_metrics(layer):
        raise UsageError(
            f"Layer {layer.name} holds the metric {metric.name!r} of Keras 3, which is not summed over "
            "the replicas: return a metric from build_metrics instead."
        )
    for name, child in tf.train.TrackableView.children(layer).items():
        if isinstance(child, tf.Variable):
            raise UsageError(
                f"Layer {layer.name} holds a tf.Variable ({name}), which Keras 3 neither trains nor "
                "saves: make it by add_weight."
            )


def adapter_of(layer: Any) -> "Adapter":
    """Returns the adapter of a layer, always the same one."""
    if "_ctl_adapter" not in vars(layer):
        # In the dict, because Keras' own __setattr__ would track the adapter.
        vars(layer)["_ctl_adapter"] = Adapter(layer)
    return vars(layer)["_ctl_adapter"]


def _of_inner(read: Callable[[Any], Any], write: Any = None) -> Any:
    """Returns a property that reads the inner layer; the constructor of tf_keras cannot set it."""

    def assign(adapter: Any, value: Any) -> None:
        if write is not None and "_is_made" in vars(adapter):
            write(adapter.inner, value)

    return property(lambda adapter: read(adapter.inner), assign)


def _delegate(name: str) -> Any:
    return _of_inner(lambda inner: getattr(inner, name), lambda inner, v: setattr(inner, name, v))


class Adapter(Adapted):
    """A tf_keras model with the variables, layers and losses of a layer or model of Keras 3.

    A call is a call of the Keras 3 layer, and attributes that tf_keras.Model does not have are those of
    the layer: users' code need not know of the adapter.

    Args:
        inner: the layer or model of Keras 3.

    Attributes:
        inner: the same.
    """

    inner: Any
    built = _delegate("built")
    trainable = _delegate("trainable")
    trainable_weights = _of_inner(lambda inner: raw(inner.trainable_weights))
    non_trainable_weights = _of_inner(lambda inner: raw(inner.non_trainable_weights))
    # Without the states of SeedGenerators: ctl's draws have no state.
    weights = _of_inner(lambda inner: raw(inner.weights))
    trainable_variables = trainable_weights
    non_trainable_variables = non_trainable_weights
    variables = weights
    metrics = _of_inner(lambda inner: [])
    frozen_variables = _of_inner(
        lambda inner: [not v.trainable for v in private.variables_of(inner, trainable=True)]
    )
    # The layer itself, without the layers inside of it.
    _trainable = _of_inner(lambda inner: inner.trainable, private.set_trainable)
    _trainable_weights = _of_inner(lambda inner: raw(private.variables_of(inner, trainable=True)))
    _non_trainable_weights = _of_inner(
        lambda inner: raw(private.variables_of(inner, trainable=False))
    )
    _losses = _of_inner(lambda inner: list(private.losses_of(inner)))
    _callable_losses = _of_inner(
        lambda inner: [
            functools.partial(v.regularizer, private.value_of(v))
            for v in private.variables_of(inner, trainable=True)
            if v.regularizer is not None and inner.trainable and v.trainable
        ]
    )

    def __init__(self, inner: Any):
        object.__setattr__(self, "inner", inner)  # without TensorFlow's tracking
        super().__init__(name=inner.name, autocast=False)
        object.__setattr__(self, "_is_made", True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer of Keras 3."""
        args, kwargs = tf.nest.map_structure(hide_rows, (args, kwargs))
        return tf.nest.map_structure(_show_rows, self.inner(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner" not in vars(self):
            raise AttributeError(name)
        value = getattr(self.inner, name)
        return private.value_of(value) if detection.is_keras3(value, "Variable") else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name) or "_is_made" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def check_built(self) -> None:
        """Raises UsageError if it was built under another policy, or if parameter servers train it."""
        dtypes = precision.global_dtypes()
        expected, *others = (getattr(each.policy(), "name", each.floatx()) for each in dtypes)
        for found in {*others} - {expected}:
            raise UsageError(
                f"The model of Keras 3 was built under the dtype policy {found} instead of {expected}: "
                "import keras at the top of the file, set runtime.precision instead of Keras' global "
                "policy, or give single layers a dtype."
            )
        if strategies.spec_of(tf.distribute.get_strategy()).coordinated:
            raise UsageError(
                "Parameter servers do not train models of Keras 3, whose variables TensorFlow cannot "
                "divide among them: use tf_keras, or another strategy."
            )

    def synchronize_batch_norm(self) -> list[str]:
        """Makes plain batch normalizations use the statistics of the global batch."""
        return batch_norm.synchronize(self.inner)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the Keras 3 model, without ctl's parts."""
        self._call_original("save", *args, **kwargs)

    def to_json(self, **kwargs: Any) -> str:
        """Returns the Keras 3 model as JSON, without ctl's parts."""
        return str(self._call_original("to_json", **kwargs))

    def _call_original(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with batch_norm.original_classes(self.inner):
            return getattr(self.inner, name)(*args, **kwargs)

    def _flatten_layers(self, recursive: bool = True, include_self: bool = True) -> Iterator[Any]:
        if include_self:
            yield self
        yield from map(adapter_of, private.layers_of(self.inner, recursive=recursive))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Returns the tf.Variables by name, and the layers by position, as models of tf_keras do.

        The names in Keras' own structure differ between versions, and a keras.Variable cannot be saved
        in the background.
        """
        layers = map(adapter_of, private.layers_of(self.inner, recursive=False))
        saved = [each for each in layers if any(v._contents() for v in each._flatten_layers())]
        return self._contents() | {f"layer_with_weights-{i}": v for i, v in enumerate(saved)}

    def _contents(self) -> dict[str, Any]:
        """Returns the tf.Variables and tables of this layer by their names, without inner layers."""
        contents: dict[str, Any] = {}
        for variable in (*self._trainable_weights, *self._non_trainable_weights):
            name = variable.name.partition(":")[0].rpartition("/")[2]
            names = (name, *(f"{name}_{number}" for number in range(1, len(contents) + 1)))
            contents[next(each for each in names if each not in contents)] = variable
        for name, child in tf.train.TrackableView.children(self.inner).items():
            if hasattr(child, "_resource_handle"):
                contents[name] = child
        return contents


def hide_rows(value: Any) -> Any:
    """Returns a tensor of a step as one whose static shape does not tell that it has a single row.

    Keras takes a static axis of size 1 for one to broadcast, and then computes other ops. They must be
    the same in all micro-batches, so if one of them has one row, all are hidden.
    """
    rows = row_mask.current()
    if rows is None or not rows.single or not tf.is_symbolic_tensor(value):
        return value
    if value.shape[:1] != [rows.count]:
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]])


def _show_rows(value: Any) -> Any:
    """Returns an output with the static number of rows that `hide_rows` has hidden in the inputs."""
    rows = row_mask.current()
    if rows is None or not rows.single or not isinstance(rows.count, int):
        return value
    if not tf.is_symbolic_tensor(value) or value.shape[:1] != [None]:
        return value
    result = tf.ensure_shape(value, [rows.count, *value.shape[1:]])
    if hasattr(value, "_keras_mask"):
        result._keras_mask = value._keras_mask
    return result


for _name in _DELEGATED:
    setattr(Adapter, _name, _delegate(_name))


class _LossesOfThread(threading.local):
    """The losses that a layer adds in a call, one list in each thread.

    tf.distribute traces the replicas in threads, which take turns inside of a forward pass. In a list of
    the layer itself, the losses of one replica would replace those of the other one.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, values: Iterable[Any]) -> None:
        if not passes.in_second_pass():  # a recomputation adds no loss again
            self._values.extend(values)

    def clear(self) -> None:
        self._values.clear()


def _describe_variables(layer: Any, prefix: str) -> None:
    """Gives the tf.Variables their constraints, and names by layers without models: "dense/kernel".

    These are their names in tf_keras. Keras 3 would name them "sequential_1/dense/kernel", with a number
    that it counts up in each process.
    """
    if not detection.is_keras3(layer, "Sequential") and not detection.is_keras3(
        layer, "Functional"
    ):
        prefix = f"{prefix}{layer.name}/"
    for trainable in (True, False):
        for variable in private.variables_of(layer, trainable=trainable):
            value, name = private.value_of(variable), f"{prefix}{variable.name}"
            # The copies of the replicas; central storage wraps a single variable.
            for component in getattr(value, "values", (getattr(value, "_v", value),)):
                if component is not None:
                    component._handle_name = f"{name}:0"
                    # tf_keras' optimizers apply it.
                    component._constraint = variable.constraint
            if hasattr(value, "_common_name"):  # of several replicas; slots are named by it
                value._common_name = name
    for inner in private.layers_of(layer, recursive=False):
        _describe_variables(inner, prefix)
