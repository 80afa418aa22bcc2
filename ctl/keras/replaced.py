"""The table of what ctl replaces in TensorFlow, tf_keras and Keras 3 for the whole process.

`apply` replaces it when a trainer, a `ctl.Step` or the data of `ctl.data.distribute` is built; an import
of ctl replaces nothing. `ctl devices --replaced` prints the table.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib
import inspect
import sys
import threading
from typing import Any

IN_STEPS = "in a step"
ALWAYS = "always"
_KERAS_3 = "keras.src.backend.tensorflow"


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Attributes of a module, a class or an object that ctl replaces.

    Attributes:
        owner: "module:name", or "module" for the module itself. What belongs to Keras 3 is replaced once
            something else has imported it.
        names: the attributes.
        function: "module:function" of ctl. In place of a function, it is called with the original and
            the arguments; other values become what it returns for them.
        why: the reason.
        when: where it computes something else than the original.
    """

    owner: str
    names: tuple[str, ...]
    function: str
    why: str
    when: str = IN_STEPS


# fmt: off
REPLACED = (
    Replacement("tensorflow:nn", ("gelu",), "ctl.replica.layers.compiled_nn:gelu",
        "a gradient that stores less, where XLA compiles for a GPU (runtime.kernels)"),
    Replacement("tensorflow:nn", ("max_pool2d",), "ctl.replica.layers.compiled_nn:max_pool",
        "a gradient that reads less, where XLA compiles for a GPU (runtime.kernels); tf.nn.max_pool "
        "calls it"),
    Replacement("tensorflow:compat.v1.nn", ("max_pool",), "ctl.replica.layers.compiled_nn:max_pool",
        "as max_pool2d; MaxPooling2D of tf_keras calls it"),
    Replacement("tf_keras:layers.MultiHeadAttention", ("_compute_attention",),
        "ctl.replica.layers.keras_attention:multi_head",
        "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras:layers.Attention", ("_apply_scores",),
        "ctl.replica.layers.keras_attention:apply_scores",
        "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras:layers.MultiHeadAttention", ("__call__",),
        "ctl.replica.layers.keras_attention:note_scores",
        "notes whether the scores are returned, which the fused kernel does not store"),
    Replacement("tf_keras:layers.Attention", ("__call__",),
        "ctl.replica.layers.keras_attention:note_scores",
        "notes whether the scores are returned, which the fused kernel does not store"),
    Replacement(f"{_KERAS_3}.nn", ("dot_product_attention",),
        "ctl.replica.layers.keras_attention:keras3", "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras.src.backend:RandomGenerator",
        ("dropout", "random_uniform", "random_normal", "truncated_normal",
         "make_seed_for_stateless_op", "make_legacy_seed"),
        "ctl.replica.random.dropout:draw", "random layers draw by (seed, layer, step, row)"),
    Replacement(f"{_KERAS_3}.random", ("dropout", "uniform", "normal", "draw_seed"),
        "ctl.replica.keras3.random:draw", "random layers draw by (seed, layer, step, row)"),
    Replacement("tf_keras:layers.RandomFlip", ("call",), "ctl.replica.random.image_layers:call",
        "draws by row, and not one seed for the local batch"),
    Replacement("tf_keras:layers.RandomContrast", ("call",), "ctl.replica.random.image_layers:call",
        "draws by row, and not one seed for the local batch"),
    Replacement("tf_keras:layers.RandomCrop", ("call",), "ctl.replica.random.image_layers:call",
        "draws by row, and not two integers for the local batch"),
    Replacement("tf_keras.src.layers.rnn.base_conv_lstm:ConvLSTM", ("call",),
        "ctl.replica.random.dropout:call_with_new_masks",
        "its cell would keep the dropout masks of another replica or micro-batch", ALWAYS),
    Replacement("tf_keras:layers.Layer", ("add_loss",), "ctl.replica.layers.penalties:add_loss",
        "a penalty that call adds as a function counts once a pass, and not once a trace; a "
        "recomputation adds none"),
    Replacement("tf_keras:layers.Layer", ("add_update",), "ctl.replica.graphs.passes:run_once",
        "a recomputation (ctl.recompute) moves no statistics again"),
    Replacement("tf_keras:metrics.Metric", ("__new__",), "ctl.replica.layers.layer_metrics:create",
        "layers may update metrics while a model is built in a strategy's scope", ALWAYS),
    Replacement("tf_keras.src.layers.normalization.spectral_normalization", ("tf",),
        "ctl.replica.arithmetic.models:with_tf_keras",
        "SpectralNormalization uses tf.keras, which may be Keras 3", ALWAYS),
    Replacement("tensorflow.python.distribute.values", ("apply_aggregation_replica_context",),
        "ctl.replica.arithmetic.replicas:aggregate",
        "replicas that are not merged (several GPUs) assign a variable with the value of the first "
        "replica, which fails in TensorFlow", ALWAYS),
    Replacement("tensorflow.python.framework.ops:gradient_registry", ("_registry",),
        "ctl.replica.graphs.custom_gradients:Gradients",
        "the gradient of a tf.custom_gradient is freed with its graph", ALWAYS),
    Replacement("tensorflow.python.autograph.core.config", ("CONVERSION_RULES",),
        "ctl.data.autograph:without_ctl", "AutoGraph does not convert functions of ctl", ALWAYS),
    Replacement("tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper",
        ("__init__",), "ctl.data.host_random:check_map",
        "a function of a dataset that draws from Python or numpy while it is traced is rejected",
        "while build_dataset runs"),
)
# fmt: on
_LOCK = threading.Lock()
_APPLIED: list[Replacement] = []


def apply() -> None:
    """Replaces what is in the table and not replaced yet; call it before a model is built.

    A row of Keras 3 is left out if nothing has imported Keras 3 with the backend TensorFlow, so call it
    again when a model of Keras 3 is there.
    """
    with _LOCK:
        for row in REPLACED:
            owner = None if row in _APPLIED else _find(row.owner)
            if owner is not None and all(hasattr(owner, name) for name in row.names):
                for name in row.names:
                    _replace(owner, name, _find(row.function))
                _APPLIED.append(row)


def describe() -> list[tuple[str, str]]:
    """Returns the names that ctl replaces, each with where it does so and the reason."""
    return [
        (f"{row.owner.replace(':', '.')}.{name}", f"{row.when}: {row.why}")
        for row in REPLACED
        for name in row.names
    ]


def _find(path: str) -> Any:
    """Returns the object at "module:name"; None if it is of Keras 3, which nothing has imported."""
    module, _, name = path.partition(":")
    found = (
        sys.modules.get(module) if module.startswith(_KERAS_3) else importlib.import_module(module)
    )
    return functools.reduce(getattr, filter(None, name.split(".")), found)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if not callable(original):
        setattr(owner, name, function(original))
        return
    # A function of TensorFlow's API passes its arguments on to one that it holds. If that is replaced,
    # the function stays the same object: code that has imported it by name computes the same, and it can
    # be pickled.
    cell = next(_cells(original), None)
    held = cell.cell_contents if cell else original

    @functools.wraps(held)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(held, *args, **kwargs)

    # By which a layer of Keras decides what to pass.
    run.__signature__ = inspect.signature(held)  # type: ignore[attr-defined]
    if cell:
        cell.cell_contents = run
    else:
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(run) if is_static else run)


def _cells(function: Any) -> Iterator[Any]:
    """Yields the variable of a function of TensorFlow's API that holds what computes it."""
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars if cells else (), cells, strict=True):
        if name == "dispatch_target":
            yield cell
        elif name in ("op", "fn"):  # decorators around it
            yield from _cells(cell.cell_contents)
