"""The fused kernel of attention and the formula: their results, and their speed by length."""

import statistics
import time

import tensorflow as tf

from benchmarks.gpu.parts import Report
from ctl.kernels import attention

# Forms of the kernel: lengths, heads, heads of the keys, width, bias, its gradient, causal, lengths.
_FORMS = (
    (512, 512, 4, 4, 64, False, False, True, False),
    (512, 512, 4, 2, 64, True, True, True, True),
    (512, 256, 4, 1, 128, False, False, False, False),
    (512, 512, 4, 4, 256, False, False, True, False),
    (513, 257, 4, 4, 72, False, False, False, False),
)
_SHAPES = ((32, 1024), (16, 512), (64, 512), (32, 384), (128, 256), (8, 256), (256, 128))
_HEADS = ((12, 64), (8, 128))
_CALLS = 20  # in one program of XLA, since a call from Python takes longer than a kernel


def measure(report: Report) -> None:
    """Compares results, then the time of the forward and the backward pass in bfloat16, causal."""
    if attention.capability() >= (8, 0):
        for form in _FORMS:
            for dtype in (tf.bfloat16, tf.float16):
                problem = attention._try(dtype, *form)
                report(
                    f"{dtype.name} {form}", **({"error": problem} if problem else {"right": True})
                )
    for rows, length in ((2, 16),) if report.small else _SHAPES:
        for heads, width in _HEADS:
            shape = (rows, length, heads, width)
            with report.attempt(str(shape)):
                formula = _milliseconds(attention._formula, shape)
                kernel = attention._formula if report.small else attention.kernel
                report(str(shape), fused_ms=_milliseconds(kernel, shape), formula_ms=formula)


def _milliseconds(compute, shape) -> float:
    """Returns the median time of a call."""
    tensors = [tf.cast(tf.random.stateless_normal(shape, [i, 7]), tf.bfloat16) for i in range(3)]

    @tf.function(jit_compile=True)
    def loop(query, key, value):
        def body(i, query):
            with tf.GradientTape() as tape:
                tape.watch([query, key, value])
                scale = shape[-1] ** -0.5
                each = attention.Attention(query, key, value, None, None, scale, True)
                outputs = compute(each)
            gradients = tape.gradient(outputs, [query, key, value], outputs)
            return i + 1, query + tf.cast(1e-3, query.dtype) * tf.add_n(gradients)

        return tf.while_loop(lambda i, _: i < _CALLS, body, (0, query))[1]

    loop(*tensors)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        loop(*tensors)[0, 0, 0, 0].numpy()
        seconds.append((time.perf_counter() - start) / _CALLS)
    return round(1e3 * statistics.median(seconds), 4)
