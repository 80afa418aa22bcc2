"""The GELU of compiled steps: its values, its gradient, and what XLA stores for it."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.replica.arithmetic import row_mask
from ctl.replica.graphs import ops
from ctl.replica.layers import gelu


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretends that XLA compiles for a GPU."""
    monkeypatch.setattr(gelu, "is_compiled_for_gpu", lambda tensor: ops.is_compiled())


def compute(x, *, approximate=False, step=True):
    """Returns the values, the gradient and the program."""
    gelu.prepare(None, 0, scope="model")

    @tf.function(jit_compile=True)
    def run(x):
        with row_mask.examples(count=8) if step else tf.name_scope("outside"):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.nn.gelu(x, approximate)
            return y, tape.gradient(y, x)

    y, gradient = run(x)
    return y, gradient, run.experimental_get_compiler_ir(x)(stage="hlo")


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_values_and_gradient_are_those_of_float64_rounded_once(dtype):
    x = tf.cast(tf.linspace(-9.0, 9.0, 2000), dtype)
    y, gradient, _ = compute(x)
    with tf.GradientTape() as tape:
        wide = tf.cast(x, tf.float64)
        tape.watch(wide)
        expected = tf.nn.gelu(wide)
    # Half a unit in the last place, and the error of 1 + erf in float32 for x < -4.
    for value, exact in ((y, expected), (gradient, tape.gradient(expected, wide))):
        rounded = np.abs(exact) * np.finfo(dtype.as_numpy_dtype).eps / 2 if dtype == tf.float16 else (
            np.abs(exact) * 2.0**-8
        )  # fmt: skip
        assert np.all(np.abs(tf.cast(value, tf.float64) - exact) <= 1.01 * rounded + 1e-6)


def test_the_backward_pass_needs_the_input_alone():
    x = tf.zeros([8, 16], tf.bfloat16)
    program = compute(x)[2]
    # XLA would store erfc, and the gradient in float32 for the gradient of a bias.
    assert 'op_type="Erf"' in program and 'op_type="Erfc"' not in program
    assert "opt-barrier" in program
    for other in ({"approximate": True}, {"step": False}):
        assert 'op_type="Erf"' not in compute(x, **other)[2]
    assert 'op_type="Erf"' not in compute(tf.cast(x, tf.float32))[2]
