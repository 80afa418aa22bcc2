"""The table of what ctl replaces in TensorFlow, tf_keras and Keras 3 for the whole process.

`apply` replaces it when a trainer, a `ctl.Step` or the data of `ctl.data.distribute` is built; an import
of ctl replaces nothing. `ctl devices --replaced` prints the table.
"""

from collections.abc import Callable, Iterator
import contextvars
import functools
import importlib
import inspect
import sys
import threading
from typing import Any, NamedTuple

ALWAYS = "always"
_IN_KEYED = "in ctl.random.keyed()"
KEYED = contextvars.ContextVar("keyed", default=False)  # whether the code inside is in it
_KERAS_3 = "keras.src.backend.tensorflow"


class Replacement(NamedTuple):
    """Attributes that ctl replaces.

    Attributes:
        module: a module. What is in one of Keras 3 is replaced once something else has imported it.
        names: the attributes: functions and values of the module, and those of its classes and objects.
        function: "module:function" of ctl. In place of a function, it is called with the original and
            the arguments; other values become what it returns for them.
        why: the reason.
        when: where it computes something else than the original.
    """

    module: str
    names: str
    function: str
    why: str
    when: str = "in a step"


# fmt: off
_DRAWS = (
    "ctl.random.library_draws:draw", "libraries draw by (seed, call, step, row)", _IN_KEYED)
REPLACED = (
    Replacement("tensorflow", "nn.gelu", "ctl.kernels.compiled_nn:gelu",
        "a gradient that stores less, where XLA compiles for a GPU (runtime.kernels)"),
    Replacement("tensorflow", "nn.max_pool2d compat.v1.nn.max_pool",
        "ctl.kernels.compiled_nn:max_pool",  # one of which all others, and MaxPooling2D, call
        "a gradient that reads less, where XLA compiles for a GPU (runtime.kernels)"),
    Replacement("tf_keras.layers", "MultiHeadAttention._compute_attention",
        "ctl.keras.attention:multi_head",
        "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras.layers", "Attention._apply_scores",
        "ctl.keras.attention:apply_scores",
        "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras.layers", "MultiHeadAttention.__call__ Attention.__call__",
        "ctl.keras.attention:note_scores",
        "notes whether the scores are returned, which the fused kernel does not store"),
    Replacement(f"{_KERAS_3}.nn", "dot_product_attention",
        "ctl.keras.attention:keras3", "the fused kernel of cuDNN (runtime.kernels)"),
    Replacement("tf_keras.src.backend",
        "RandomGenerator.dropout RandomGenerator.random_uniform RandomGenerator.random_normal "
        "RandomGenerator.truncated_normal RandomGenerator.make_seed_for_stateless_op "
        "RandomGenerator.make_legacy_seed", "ctl.keras.dropout:draw",
        "random layers draw by (seed, layer, step, row)"),
    Replacement(f"{_KERAS_3}.random", "dropout uniform normal draw_seed",
        "ctl.keras.keras3.random:draw", "random layers draw by (seed, layer, step, row)"),
    Replacement("tensorflow.python.ops.gen_random_ops",
        "multinomial random_standard_normal random_uniform random_uniform_int truncated_normal",
        *_DRAWS),
    Replacement("tensorflow.python.ops.gen_stateless_random_ops", "stateless_multinomial", *_DRAWS),
    Replacement("tensorflow.python.ops.gen_stateless_random_ops_v2",
        "stateless_random_normal_v2 stateless_random_uniform_v2 stateless_random_uniform_int_v2 "
        "stateless_truncated_normal_v2 stateless_random_uniform_full_int_v2", *_DRAWS),
    Replacement("tf_keras.layers", "RandomFlip.call RandomContrast.call RandomCrop.call",
        "ctl.keras.image_layers:call", "draws by row, and not once for the local batch"),
    Replacement("tf_keras.src.layers.rnn.base_conv_lstm", "ConvLSTM.call",
        "ctl.keras.dropout:call_with_new_masks",
        "its cell would keep the dropout masks of another replica or micro-batch", ALWAYS),
    Replacement("tf_keras.layers", "Layer.add_loss", "ctl.keras.penalties:add_loss",
        "a penalty that call adds as a function counts once a pass, and not once a trace; a "
        "recomputation adds none"),
    Replacement("tf_keras.layers", "Layer.add_update", "ctl.graphs.passes:run_once",
        "a recomputation (ctl.recompute) moves no statistics again"),
    Replacement("tf_keras.metrics", "Metric.__new__", "ctl.keras.layer_metrics:create",
        "layers may update metrics while a model is built in a strategy's scope", ALWAYS),
    Replacement("tf_keras.src.layers.normalization.spectral_normalization", "tf",
        "ctl.keras.models:with_tf_keras",
        "SpectralNormalization uses tf.keras, which may be Keras 3", ALWAYS),
    Replacement("tensorflow.python.distribute.values", "apply_aggregation_replica_context",
        "ctl.rows.replicas:aggregate",
        "replicas that are not merged (several GPUs) assign a variable with the value of the first "
        "replica, which fails in TensorFlow", ALWAYS),
    Replacement("tensorflow", "distribute.Strategy.num_replicas_in_sync "
        "distribute.ReplicaContext.num_replicas_in_sync "
        "distribute.ReplicaContext.replica_id_in_sync_group", "ctl.checks.split_updates:number",
        "notes its use in optimizers and parts of the update, which is an error"),
    Replacement("tensorflow", "distribute.ReplicaContext.all_reduce "
        "distribute.ReplicaContext.all_gather", "ctl.checks.split_updates:collective",
        "notes its use in optimizers and parts of the update, which is an error"),
    Replacement("tensorflow.python.framework.ops", "gradient_registry._registry",
        "ctl.graphs.custom_gradients:Gradients",
        "the gradient of a tf.custom_gradient is freed with its graph", ALWAYS),
    Replacement("tensorflow.python.autograph.core.config", "CONVERSION_RULES",
        "ctl.data.autograph:without_ctl", "AutoGraph does not convert functions of ctl", ALWAYS),
    Replacement("tensorflow.python.data.ops.structured_function",
        "StructuredFunctionWrapper.__init__", "ctl.data.host_random:check_map",
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
            is_there = not row.module.startswith(_KERAS_3) or row.module in sys.modules
            if is_there and row not in _APPLIED:
                for owner, name in owners(row):
                    _replace(owner, name, row)
                _APPLIED.append(row)


def owners(row: Replacement) -> list[tuple[Any, str]]:
    """Returns the modules, classes and objects of a row, each with the name of an attribute."""
    module = importlib.import_module(row.module)
    paths = [name.split(".") for name in row.names.split()]
    return [(functools.reduce(getattr, path, module), name) for *path, name in paths]


def describe() -> list[tuple[str, str]]:
    """Returns the names that ctl replaces, each with where it does so and the reason."""
    rows = [(f"{row.module}.{name}", row) for row in REPLACED for name in row.names.split()]
    return [(name, f"{row.when}: {row.why}") for name, row in rows]


@functools.cache
def load(row: str) -> Callable[..., Any]:
    """Imports the function at "module:function"."""
    module, _, name = row.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _replace(owner: Any, name: str, row: Replacement) -> None:
    original = getattr(owner, name)
    if not callable(original):
        setattr(owner, name, load(row.function)(original))
        return
    # A function of TensorFlow's API passes its arguments on to one that it holds. If that is replaced,
    # the function stays the same object: code that has imported it by name computes the same, and it can
    # be pickled.
    cell = next(_cells(original), None)
    held = cell.cell_contents if cell else original

    @functools.wraps(held)
    def run(*args: Any, **kwargs: Any) -> Any:
        if row.when == _IN_KEYED and not KEYED.get():
            return held(*args, **kwargs)
        return load(row.function)(held, *args, **kwargs)  # imported when it is first called

    # By which a layer of Keras decides what to pass.
    run.__signature__ = inspect.signature(held)  # type: ignore[attr-defined]
    if cell:
        cell.cell_contents = run
    else:
        setattr(owner, name, run)


def _cells(function: Any) -> Iterator[Any]:
    """Yields the variable of a function of TensorFlow's API that holds what computes it."""
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars if cells else (), cells, strict=True):
        if name == "dispatch_target":
            yield cell
        elif name in ("op", "fn"):  # decorators around it
            yield from _cells(cell.cell_contents)
