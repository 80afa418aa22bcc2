"""Floating-point operations of a training step, counted in its graph."""

import math

import tensorflow as tf

from ctl.built.inner_loop import TrainerOwner
from ctl.compile.compiled_loop import CompiledLoop
from ctl.hardware import devices, strategies

_OUTER_LOOP = 1  # the loop over the steps; a loop in a step has an unknown number of iterations
_OPAQUE = ("CudnnRNN", "XlaCallModule", "TPU", "PyFunc", "EagerPyFunc")
# Name of the device -> dtype -> dense 10^12 operations per second, without sparsity. From NVIDIA's data
# sheets of V100, A100, H100 and H200 (SXM). A device that is not listed has no known peak: the peak of
# a similar one would be wrong, as PCIe cards run at lower clocks under the same family name.
_AMPERE = {"float16": 312.0, "bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}
_HOPPER = {"float16": 989.4, "bfloat16": 989.4, "tensorfloat32": 494.7, "float32": 66.9}
_VOLTA = {"float16": 125.0, "float32": 15.7}
_PEAKS = {
    "Tesla V100-SXM2-16GB": _VOLTA,
    "Tesla V100-SXM2-32GB": _VOLTA,
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
}


class _UncountableError(Exception):
    """The number of operations cannot be read from the graph."""


def measure(trainer: TrainerOwner, examples_per_second: float | None) -> dict[str, float]:
    """Returns the figures of floating-point operations for result.json, those that are known.

    Args:
        trainer: a `StandardTrainer` that has run a step.
        examples_per_second: its speed; None if it is not known.
    """
    flops, dtype = count_flops(trainer), trainer.compute_dtype.name
    measured: dict[str, float] = {"flops_per_step": flops} if flops else {}
    peaks = [peak_flops(name, dtype) for name in devices.replica_devices(trainer.strategy)]
    if flops and examples_per_second and all(peaks):
        steps_per_second = examples_per_second / trainer.global_batch_size
        peak = trainer.strategy.num_replicas_in_sync * min(peak for peak in peaks if peak)
        measured["model_flops_utilization"] = flops * steps_per_second / peak
    return measured


def peak_flops(device: str, compute_dtype: str) -> float | None:
    """Returns the peak of a device, in floating-point operations per second.

    Args:
        device: such as "GPU:0".
        compute_dtype: the dtype of matrix products.

    Returns:
        The peak; None if it is not known for exactly this device and dtype.
    """
    kind, _, index = device.partition(":")
    physical = tf.config.list_physical_devices(kind)
    if kind != "GPU" or not index.isdecimal() or int(index) >= len(physical):
        return None
    details = tf.config.experimental.get_device_details(physical[int(index)])
    peaks = _PEAKS.get(details.get("device_name", ""), {})
    # TensorFlow multiplies float32 matrices in TensorFloat-32 on devices that have it.
    if compute_dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        compute_dtype = "tensorfloat32" if "tensorfloat32" in peaks else "float32"
    peak = peaks.get(compute_dtype)
    return 1e12 * peak if peak else None


def count_flops(trainer: TrainerOwner) -> int | None:
    """Returns the floating-point operations of one training step on all replicas.

    It counts the products and sums of matrix products and convolutions, forward and backward, as for
    the model-flops utilization of Chowdhery et al. 2022, "PaLM", appendix B. What a step computes
    twice to save memory counts twice.

    Args:
        trainer: a `StandardTrainer` that has run a step.

    Returns:
        The number; None if a shape is not static, if the step contains a loop or an operation whose
        work is not known, or if other processes run it.
    """
    strategy = trainer.strategy
    if strategies.spec_of(strategy).remote:
        return None
    graphs = list_graphs(trainer)
    if not graphs:
        return None
    try:
        count = _count_graph(graphs[-1], loops=0)
    except _UncountableError:
        return None
    is_program = isinstance(trainer._train_loop_fn, CompiledLoop)  # of one replica
    local = 1 if is_program else len(devices.replica_devices(strategy))
    return count * strategy.num_replicas_in_sync // local if count else None


def list_graphs(trainer: TrainerOwner) -> list[tf.Graph]:
    """Returns the graphs that the inner loop of a trainer was traced into, the last one last."""
    loop = trainer._train_loop_fn
    if isinstance(loop, CompiledLoop):
        functions = loop.traces()
    else:
        functions = getattr(loop, "_list_all_concrete_functions", list)()
    return [function.graph for function in functions]


def _count_graph(graph: tf.Graph, *, loops: int) -> int:
    return sum(_count_operation(operation, loops=loops) for operation in graph.get_operations())


def _count_operation(operation: tf.Operation, *, loops: int) -> int:
    counter = _COUNTERS.get(operation.type)
    if operation.type.startswith(_OPAQUE) and not counter:
        raise _UncountableError
    if counter:
        # TensorFlow adds the gradient of the data to the graph too, and removes it before it runs.
        outputs = {id(tensor) for tensor in getattr(operation.graph, "outputs", ())}
        is_used = any(t.consumers() or id(t) in outputs for t in operation.outputs)
        return counter(operation) if is_used else 0
    names = [
        function.name
        for value in operation.node_def.attr.values()
        for function in ([value.func] if value.HasField("func") else value.list.func)
    ]
    if not names:
        return 0
    is_loop = operation.type in ("While", "StatelessWhile")
    counts = [
        _count_graph(operation.graph._get_function(name).graph, loops=loops + is_loop)
        for name in names
        if operation.graph._get_function(name) is not None
    ]
    if is_loop and loops >= _OUTER_LOOP and any(counts):
        raise _UncountableError
    # One branch of a conditional runs; a loop or a call has one function with any work.
    return max(counts, default=0)


def _size(shape: tf.TensorShape) -> int:
    if not shape.is_fully_defined():
        raise _UncountableError
    return math.prod(shape.as_list())


def _count_matmul(operation: tf.Operation) -> int:
    first = operation.inputs[0].shape
    is_transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    _size(first)
    return 2 * _size(operation.outputs[0].shape) * first[-2 if is_transposed else -1]


def _count_einsum(operation: tf.Operation) -> int:
    if len(operation.inputs) != 2:
        return 0
    equation = operation.get_attr("equation").decode()
    if "." in equation:
        raise _UncountableError
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.split("->")[0].split(","), operation.inputs, strict=True):
        _size(tensor.shape)
        sizes |= dict(zip(labels, tensor.shape.as_list(), strict=True))
    return 2 * math.prod(sizes.values())


def _count_convolution(operation: tf.Operation) -> int:
    """Each element of the output, or of its gradient, is a sum over the filter's window."""
    if "BackpropInput" in operation.type:
        kernel, output = operation.inputs[1].shape, operation.inputs[2].shape
    elif "BackpropFilter" in operation.type:
        kernel, output = operation.outputs[0].shape, operation.inputs[2].shape
    else:
        kernel, output = operation.inputs[1].shape, operation.outputs[0].shape
    window = _size(kernel) // kernel[-1]
    if operation.type.startswith("Depthwise"):
        window //= kernel[-2]
    return 2 * _size(output) * window


def _count_attention(operation: tf.Operation) -> int:
    """Counts the products of the formula: two in the forward pass, and four in the backward pass."""
    module = operation.get_attr("module")
    if b"__cudnn$fmha" not in module:
        raise _UncountableError
    query, key = operation.inputs[0].shape, operation.inputs[1].shape
    products = 4 if b"Backward" in module else 2
    return products * 2 * _size(query) * key[1]


_CONVOLUTIONS = (
    *(f"Conv2D{end}" for end in ("", "BackpropInput", "BackpropFilter")),
    *(f"Conv3D{end}" for end in ("", "BackpropInputV2", "BackpropFilterV2")),
    *(f"DepthwiseConv2dNative{end}" for end in ("", "BackpropInput", "BackpropFilter")),
)
_COUNTERS = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _count_matmul),
    "Einsum": _count_einsum,
    "XlaCallModule": _count_attention,
    **dict.fromkeys(_CONVOLUTIONS, _count_convolution),
}
