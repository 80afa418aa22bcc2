"""Convolutions whose gradient oneDNN computes wrong are found, on the CPUs where it is wrong."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks import onednn
from ctl.hardware import host
from ctl.modes.check import learning_checks
from ctl.modes.check.outcome import WARNING
from tests.modes.check import planted
from tests.support import child

AVX2, AVX512 = "avx avx2 fma", "avx avx2 avx512f fma"
CONVOLUTION = """
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([
            layers.Reshape([2, 2, 1]),
            layers.Conv2D(8, 1, strides=2, name="shortcut"),
            layers.Flatten(),
            layers.Dense(3)])
    """


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(onednn, "_REPORTED", set())
    for name in ("TF_ENABLE_ONEDNN_OPTS", *onednn._LIMITS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host, "identify_cpu", lambda: ("", AVX2))


def make_step(channels=3, kernel=1, strides=2, dtype="float32", replicas=1):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        layer = tf_keras.layers.Conv2D(4, kernel, strides, name="shortcut", dtype=dtype)
        model = tf_keras.Sequential([tf_keras.Input([5, 5, channels], dtype=dtype), layer])
    step = ctl.Step(
        model,
        tf_keras.optimizers.SGD(),
        lambda batch, outputs: tf.reduce_sum(outputs**2, [1, 2, 3]),
        global_batch_size=4,
        strategy=strategy,
    )
    data = np.random.default_rng(0).normal(size=[4, 5, 5, channels]).astype(dtype)
    labels = np.zeros(4, dtype)
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((data, labels)).batch(4)
    )
    step(next(iter(dataset)))


def test_layer_and_variable_that_avoids_it_are_named_once(capsys):
    make_step(replicas=2)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "Warning: oneDNN computes the gradient of a 1x1 convolution wrong on this CPU"
    )
    assert "shortcut" in line and line.endswith("TF_ENABLE_ONEDNN_OPTS=0.")


@pytest.mark.parametrize(
    "options", [{"channels": 8}, {"kernel": 3}, {"strides": 1}, {"dtype": "float64"}], ids=str
)
def test_other_convolutions_are_right(capsys, options):
    make_step(**options)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("instructions", "variables", "found"),
    [
        (AVX512, {}, False),
        (AVX512, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, True),
        (AVX2, {"ONEDNN_MAX_CPU_ISA": "avx"}, False),
        (AVX2, {"DNNL_MAX_CPU_ISA": "SSE41"}, False),
        (AVX2, {"TF_ENABLE_ONEDNN_OPTS": "0"}, False),
        ("avx", {}, False),
        ("asimd sve", {}, False),
    ],
)
def test_kernels_depend_on_the_cpu_and_the_variables(monkeypatch, instructions, variables, found):
    monkeypatch.setattr(host, "identify_cpu", lambda: ("", instructions))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert onednn._uses_avx2() == found


def test_check_of_the_gradients_warns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = learning_checks.check_gradients(planted.make_factory(tmp_path, CONVOLUTION))
    assert outcome.verdict == WARNING and "shortcut" in outcome.observation
    assert outcome.fix == onednn.FIX


PROGRAM = """
import numpy as np
import tensorflow as tf

rows = np.random.default_rng(0)
x, g = (rows.normal(size=shape).astype(np.float32) for shape in ([8, 7, 7, 3], [8, 4, 4, 8]))
y = tf.raw_ops.Conv2DBackpropFilter(
    input=x, filter_sizes=[1, 1, 3, 8], out_backprop=g, strides=[1, 2, 2, 1], padding="SAME"
)
exact = np.einsum("bhwc,bhwf->cf", x[:, ::2, ::2], g)
print(float(abs(y.numpy()[0, 0] - exact).max() / abs(exact).max()))
"""


@pytest.mark.slow
def test_the_variable_makes_the_gradient_right():
    run = child.run(["-c", PROGRAM], ONEDNN_MAX_CPU_ISA="AVX2", TF_ENABLE_ONEDNN_OPTS="0")
    assert float(run.stdout) < 1e-5
