"""Attention by the fused kernel of cuDNN where XLA compiles it for a GPU, and by the formula elsewhere.

The kernel computes the softmax block by block, and stores no matrix of length x length (Dao 2023,
"FlashAttention-2", arXiv:2307.08691). XLA has it for JAX, as a custom call. Its names and fields are
those of jax/_src/cudnn/fused_attention_stablehlo.py and of `CudnnfMHABackendConfig` in
xla/service/gpu/backend_configs.proto. TensorFlow 2.19 to 2.22 have all of them; 2.18 lacks one, and
computes the formula.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import contextvars
import dataclasses
import functools
import json
import logging
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.graphs.ops import is_compiled
from ctl.private.tensorflow import config, gen_xla_ops, record
from ctl.rows import row_mask

_LOG = logging.getLogger("ctl")
_DTYPES = {tf.bfloat16: "BF16", tf.float16: "F16"}
_MLIR_DTYPES = {
    tf.bfloat16: "bf16", tf.float16: "f16", tf.float32: "f32", tf.int32: "i32", tf.uint8: "ui8",
}  # fmt: skip
# Added to a logit that a mask excludes. cuDNN subtracts two of them, so it is not the smallest number.
_EXCLUDED = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}
# The product of the two lengths. On an H200 the kernel took a quarter of the time of the formula for
# 1,024 x 1,024, and more time for 384 x 384; nothing between was measured.
LEAST_PRODUCT = 512 * 512
NOT_COMPILED = "XLA does not compile it for a GPU"
_TRIAL_LENGTH = 1024
_TOLERANCE = 0.05  # of a first trial, relative; right results in bfloat16 differ by 0.006
OBSERVED: contextvars.ContextVar[Any] = contextvars.ContextVar("observed", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """The arguments of `dot_product_attention`; `lengths` are those of the queries and the keys."""

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    bias: Any
    mask: tf.Tensor | None
    scale: float
    is_causal: bool
    lengths: tuple[tf.Tensor | None, tf.Tensor | None] | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What decides whether the kernel supports it: sizes without rows, and the other arguments."""
        learns_bias = self.bias is not None and bool(record.should_record_backprop([self.bias]))
        _, length, heads, width = self.query.shape
        sizes = (length, self.key.shape[1], heads, self.key.shape[2], width)
        has_bias = self.bias is not None or self.mask is not None
        return *sizes, has_bias, learns_bias, self.is_causal, self.lengths is not None


def dot_product_attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor,
    bias: tf.Tensor | None = None, mask: tf.Tensor | None = None,
    *, scale: float | None = None, is_causal: bool = False,
    query_seq_lengths: tf.Tensor | None = None, key_value_seq_lengths: tf.Tensor | None = None,
) -> tf.Tensor:  # fmt: skip
    """Computes softmax(query key^T scale + bias) value for each head.

        q, k, v = (dense(x) for dense in self.projections)         # [rows, length, heads, width]
        y = ctl.dot_product_attention(q, k, v, is_causal=True)

    In code that XLA compiles for a GPU (`runtime.xla=loop`, the default on one GPU), in bfloat16 or
    float16, it is one kernel that stores no matrix of length x length. Everywhere else, and with
    `runtime.deterministic`, it is the formula, with the same result up to rounding: the softmax in
    float32 or wider, the products in the dtype of the arguments. `ctl explain` says which one a model
    has, and why. The arguments are those of `jax.nn.dot_product_attention`.

    Args:
        query: [rows, length, heads, width] queries.
        key: [rows, key length, key heads, width] keys, in the same dtype. `heads` is a multiple of
            `key heads`: consecutive heads share a key (Ainslie et al. 2023, arXiv:2305.13245).
        value: [rows, key length, key heads, value width] values, in the same dtype.
        bias: is added to the logits; of 4 dimensions, broadcast to [rows, heads, length, key length].
        mask: bool, True where a query reads a key; broadcast as `bias` is.
        scale: factor of the logits; 1 / sqrt(width) by default.
        is_causal: whether position i of the queries reads only the keys at positions up to i.
        query_seq_lengths: [rows] int32, the number of queries that exist. The outputs of the others
            are zero.
        key_value_seq_lengths: [rows] int32, the number of keys that exist. 0 counts as 1.

    Returns:
        [rows, length, heads, value width] outputs, in the dtype of the arguments.

    Raises:
        UsageError: the shapes do not belong together.
    """
    query, key, value = map(tf.convert_to_tensor, (query, key, value))
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    shapes = {name: tf.TensorShape(x.shape) for name, x in given.items() if x is not None}
    fits = all(shape.rank == 4 for shape in shapes.values()) and query.shape[3] == key.shape[3]
    if not fits or query.shape[2] % key.shape[2]:
        raise UsageError(
            f"ctl.dot_product_attention got {', '.join(f'{k} {v}' for k, v in shapes.items())}, but "
            "requires query [rows, length, heads, width], key and value [rows, key length, key heads, "
            "width], of which the heads divide those of the query, and bias and mask with 4 axes."
        )
    lengths = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        sizes = [tf.fill(tf.shape(x)[:1], tf.shape(x)[1]) for x in (query, key)]
        numbers = zip((query_seq_lengths, key_value_seq_lengths), sizes, strict=True)
        queries, keys = (tf.cast(size if n is None else n, tf.int32) for n, size in numbers)
        lengths = queries, tf.maximum(keys, 1)
    attention = Attention(
        query, key, value,
        None if bias is None else tf.convert_to_tensor(bias),
        None if mask is None else tf.cast(mask, tf.bool),
        query.shape[3] ** -0.5 if scale is None else scale, is_causal, lengths,
    )  # fmt: skip
    return _formula(attention) if find_obstacle(attention) else kernel(attention)


def _formula(attention: Attention) -> tf.Tensor:
    query, key, value, mask = attention.query, attention.key, attention.value, attention.mask
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = tf.repeat(key, groups, axis=2), tf.repeat(value, groups, axis=2)
    logits = tf.einsum("btnh,bsnh->bnts", query, key)
    logits = tf.cast(logits, tf.float32 if logits.dtype.size < 4 else logits.dtype)
    scale = attention.scale  # a number is not cast, since `tf.cast` would round it to float32
    logits *= tf.cast(scale, logits.dtype) if tf.is_tensor(scale) else scale
    if attention.bias is not None:
        logits += tf.cast(attention.bias, logits.dtype)
    length, key_length = tf.shape(logits)[2], tf.shape(logits)[3]
    masks = [] if mask is None else [mask]
    if attention.is_causal:
        masks.append(tf.range(length)[:, None] >= tf.range(key_length))
    if attention.lengths:
        masks.append(tf.sequence_mask(attention.lengths[1], key_length)[:, None, None, :])
    for each in masks:
        logits = tf.where(each, logits, tf.constant(-0.7 * logits.dtype.max, logits.dtype))
    weights = tf.cast(tf.nn.softmax(logits), query.dtype)
    return _drop_queries(attention, tf.einsum("bnts,bsnh->btnh", weights, value))


def _drop_queries(attention: Attention, outputs: tf.Tensor) -> tf.Tensor:
    """Sets the outputs of queries that do not exist to zero."""
    if attention.lengths is None:
        return outputs
    exists = tf.sequence_mask(attention.lengths[0], tf.shape(outputs)[1])
    return tf.where(exists[:, :, None, None], outputs, tf.zeros([], outputs.dtype))


# Where the kernel can be used.


def find_obstacle(attention: Attention) -> str:
    """Returns why the kernel cannot compute an attention, in a few words; "" if it can."""
    obstacle = note(_find_static_obstacle(attention))
    obstacle = obstacle or find_context_obstacle(attention.query)
    return obstacle or _try(attention.query.dtype, *attention.form)


def _find_static_obstacle(attention: Attention) -> str:
    """Returns the obstacle in the arguments and the options."""
    rows, tensors = row_mask.current(), (attention.query, attention.key, attention.value)
    if rows is not None and not rows.kernels:
        return "runtime.kernels=off"
    if config.is_op_determinism_enabled():
        return "runtime.deterministic: the kernel adds in any order"
    if not any({x.dtype for x in tensors} == {dtype} for dtype in _DTYPES):
        return f"{tensors[0].dtype.name}: the kernel computes in bfloat16 and float16"
    if tf.is_tensor(attention.scale) or not all(x.shape.is_fully_defined() for x in tensors):
        return "the shapes or the scale are not static"
    length, key_length, heads, _, width, has_bias, learns_bias, *_ = attention.form
    if (
        width % 8
        or width > (256 if capability() >= (9, 0) else 128)
        or width != tensors[2].shape[3]
    ):
        return f"{width} numbers per head: the kernel has multiples of 8 up to 128 (Hopper: 256)"
    if length * key_length < LEAST_PRODUCT:
        return f"short sequences ({length} x {key_length})"
    if has_bias and (length % 2 or key_length % 2):
        return f"a mask or bias for an odd length ({length} x {key_length})"
    if learns_bias and attention.bias.shape != [1, heads, length, key_length]:
        return "the gradient of a bias that is not [1, heads, length, key length]"
    return ""


def find_context_obstacle(query: tf.Tensor) -> str:
    """Returns the obstacle in where the graph will run: the kernel is a call of XLA on a GPU."""
    is_gpu = "CPU" not in query.device and capability() >= (8, 0)
    return "" if is_compiled() and is_gpu else NOT_COMPILED


@functools.cache
def capability() -> tuple[int, int]:
    """Returns the lowest compute capability of the GPUs; (0, 0) without one that TensorFlow uses."""
    gpus = tf.config.list_logical_devices("GPU") and tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return min((each.get("compute_capability", (0, 0)) for each in details), default=(0, 0))


@functools.cache
def _try(dtype: tf.DType, *form: Any) -> str:
    """Compares the kernel with the formula once, for one row; returns why it cannot be used, or "".

    A version of TensorFlow or cuDNN may not support a form, or may read a field in another way.
    """
    # The formula needs memory for matrices of length x length, so a long sequence is shortened.
    length, key_length = (min(n, _TRIAL_LENGTH + n % 2) for n in form[:2])
    heads, key_heads, width, has_bias, learns_bias, is_causal, pads = form[2:]

    def compute(function: Callable[[Attention], tf.Tensor], tensors: Sequence[tf.Tensor]) -> Any:
        query, key, value, weights, bias = tensors
        lengths = tf.constant([length // 2 + 1]), tf.constant([key_length // 2 + 1])
        arguments = (bias if has_bias else None, None, width**-0.5, is_causal)
        sources = [query, key, value] + [bias] * learns_bias
        with tf.GradientTape() as tape:
            tape.watch(sources)
            attention = Attention(query, key, value, *arguments, lengths if pads else None)
            outputs = function(attention)
        return outputs, *tape.gradient(outputs, sources, weights)

    def compare() -> float:
        queries, keys = [1, length, heads, width], [1, key_length, key_heads, width]
        shapes = [queries, keys, keys, queries, [1, heads, length, key_length] if has_bias else [1]]
        with tf.device("GPU:0"):
            draws = [tf.random.stateless_normal(shape, [i, 0]) for i, shape in enumerate(shapes)]
            tensors = [tf.cast(each, dtype) for each in draws]
            compiled = tf.function(lambda x: compute(kernel, x), autograph=False, jit_compile=True)
            pairs = zip(compiled(tensors), compute(_formula, tensors), strict=True)
            floats = [[tf.cast(x, tf.float32) for x in pair] for pair in pairs]
            return max(float(tf.norm(one - two) / tf.norm(two)) for one, two in floats)

    try:
        with futures.ThreadPoolExecutor(1) as thread:  # outside of the graph that is being traced
            error = thread.submit(compare).result()
        problem = "" if error < _TOLERANCE else f"its results are off by {error:.1g}"
    except (tf.errors.OpError, ValueError, TypeError) as exception:
        problem = str(exception).strip().splitlines()[0][:200]
    if problem:
        _LOG.warning("The fused attention of cuDNN is not used: %s.", problem)
    return problem


# The kernel.


def kernel(attention: Attention) -> tf.Tensor:
    """Computes an attention without an obstacle."""
    length, key_length, heads, key_heads, width, has_bias, learns_bias, *_ = attention.form
    rows, dtype = attention.query.shape[0], attention.query.dtype
    # A row without any query has one for the kernel, whose output is dropped.
    lengths = [tf.maximum(each, 1) for each in attention.lengths or ()]
    name = "__cudnn$fmhaScaleBiasSoftmax" if has_bias else "__cudnn$fmhaSoftmax"
    outer, inner = (rows, length, heads, width), (rows, key_length, key_heads, width)

    def call(operands: Any, results: Any, *, backward: bool) -> Any:
        operands, target = [*operands, *lengths], name + "Backward" * backward
        text = _backend_config(attention, backward=backward)
        return gen_xla_ops.xla_call_module(
            operands,
            version=9,
            module=_module(target, text, operands, results, swapped=3 if backward else 1),
            Sout=[shape for shape, _ in results],
            Tout=[result_dtype for _, result_dtype in results],
            platforms=["CUDA"],
            disabled_checks=["platform"],  # tests read the program on a CPU
        )

    @tf.custom_gradient
    def compute(*inputs: tf.Tensor) -> Any:
        sums_shape = (rows, heads, length)
        outputs, sums = call(inputs, [(outer, dtype), (sums_shape, tf.float32)], backward=False)

        def gradient(d_outputs: tf.Tensor) -> Any:
            tensors, extra = inputs[:3], inputs[3:]
            results = [(outer, dtype), (inner, dtype), (inner, dtype)]
            results += [(x.shape, dtype) for x in extra if learns_bias]
            gradients = call([*tensors, sums, d_outputs, *extra, outputs], results, backward=True)
            return [*gradients, *[None] * (len(inputs) - len(gradients))]

        return outputs, gradient

    extra = [_kernel_bias(attention)] if has_bias else []
    outputs = compute(attention.query, attention.key, attention.value, *extra)
    return _drop_queries(attention, outputs)


def _module(target: str, text: str, operands: Any, results: Any, *, swapped: int) -> str:
    """Returns a module of StableHLO that calls the kernel.

    The op `XlaCustomCallV2` would give all results their default layout. cuDNN would then write
    [rows, heads, length, width], which XLA would transpose, each gradient twice.

    Args:
        target: the name of the call.
        text: its config.
        operands: the operands.
        results: their shapes and dtypes, without the workspace of the kernel.
        swapped: the number of first results that are [rows, length, heads, width] in memory, which the
            call takes for [rows, heads, length, width] with another layout.
    """

    def describe(shape: Any, dtype: tf.DType) -> str:
        return f"tensor<{'x'.join(map(str, [*shape, _MLIR_DTYPES[dtype]]))}>"

    def layout(order: Any) -> str:
        return f"dense<[{', '.join(map(str, order))}]> : tensor<{len(order)}xindex>"

    def signature(types: Any) -> str:
        return f"({', '.join(types)})"

    inputs = [describe(x.shape, x.dtype) for x in operands]
    outputs = [describe(*each) for each in results]
    called = [describe([s[0], s[2], s[1], s[3]], d) for s, d in results[:swapped]]
    called += [*outputs[swapped:], describe([0], tf.uint8)]
    orders: list[tuple[int, ...]] = [(3, 1, 2, 0)] * swapped
    orders += [tuple(reversed(range(len(shape)))) for shape, _ in results[swapped:]] + [(0,)]
    default = [layout(tuple(reversed(range(x.shape.rank)))) for x in operands]
    names = [f"%arg{i}" for i in range(len(inputs))]
    lines = [
        f"%t{i} = stablehlo.transpose %0#{i}, dims = [0, 2, 1, 3] : ({called[i]}) -> {outputs[i]}"
        for i in range(swapped)
    ]
    returned = [f"%t{i}" if i < swapped else f"%0#{i}" for i in range(len(results))]
    arguments = ", ".join(f"{name}: {kind}" for name, kind in zip(names, inputs, strict=True))
    return "\n".join([
        "module {",
        f"func.func public @main({arguments}) -> {signature(outputs)} {{",
        f'%0:{len(called)} = stablehlo.custom_call @"{target}"({", ".join(names)}) {{',
        f"api_version = 2 : i32, backend_config = {json.dumps(text)},",
        f"operand_layouts = [{', '.join(default)}],",
        f"result_layouts = [{', '.join(map(layout, orders))}]",
        f"}} : {signature(inputs)} -> {signature(called)}",
        *lines,
        f"return {', '.join(returned)} : {', '.join(outputs)}",
        "}",
        "}",
    ])  # fmt: skip


def _kernel_bias(attention: Attention) -> tf.Tensor:
    """Returns the bias and the mask as one bias, [1 or rows, 1 or heads, length, key length]."""
    dtype, mask = attention.query.dtype, attention.mask
    bias = tf.zeros([1, 1, *attention.form[:2]], dtype)
    if attention.bias is not None:
        bias += tf.cast(attention.bias, dtype)
    return bias if mask is None else tf.where(mask, bias, tf.constant(_EXCLUDED[dtype], dtype))


def _backend_config(attention: Attention, *, backward: bool) -> str:
    """Returns the `GpuBackendConfig` of the custom call as JSON."""
    length, key_length, heads, *_, is_causal, pads = attention.form
    names = {(0, 0): "NO_MASK", (0, 1): "CAUSAL", (1, 0): "PADDING", (1, 1): "PADDING_CAUSAL"}
    # For each matrix product the contracted axes and the axes of heads. Queries, keys, values and
    # outputs are [rows, length, heads, width]; logits and weights [rows, heads, length, key length].
    products = {
        "bmm1": "33 22", "bmm2": "31 12", "bmm1_grad_gemm1": "21 12", "bmm1_grad_gemm2": "31 12",
        "bmm2_grad_gemm1": "21 12", "bmm2_grad_gemm2": "33 22",
    }  # fmt: skip
    numbers = {
        f"{product}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [axes[0]],
            "rhs_contracting_dimensions": [axes[1]],
            "lhs_batch_dimensions": ["0", axes[3]],
            "rhs_batch_dimensions": ["0", axes[4]],
        }
        for product, axes in products.items()
        if ("grad" in product) == backward
    }
    logits = {
        "element_type": _DTYPES[attention.query.dtype],
        "dimensions": [str(n) for n in (attention.query.shape[0], heads, length, key_length)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0", "workspace_size": "0", "is_cudnn_frontend": True,
        "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
    }  # fmt: skip
    fields = {
        "algorithm": algorithm,
        "fmha_scale": float(attention.scale),
        "intermediate_tensor_shape": logits,
        "is_flash_attention": True,
        "mask_type": names[pads, is_causal],
        **numbers,
        **{"dropout_rate": 0.0, "seed": 42, "sliding_window_length": 0, "max_seg_per_batch": 1},
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": fields})


# What ctl explain says.


@contextlib.contextmanager
def observe() -> Iterator[Callable[[], dict[str, str]]]:
    """Yields a function that describes the attentions that are traced inside the `with` block.

    Its result has the scope of each attention of the first micro-batch of the first replica, and the
    obstacle in its arguments and options, or "".
    """
    seen: list[Any] = []
    token = OBSERVED.set(seen)
    try:
        yield lambda: {scope: text for rows, scope, text in seen if rows is seen[0][0]}
    finally:
        OBSERVED.reset(token)


def note(obstacle: str) -> str:
    """Records an obstacle for `observe`, and returns it."""
    if OBSERVED.get() is not None:
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        OBSERVED.get().append((row_mask.current(), scope, obstacle))
    return obstacle
