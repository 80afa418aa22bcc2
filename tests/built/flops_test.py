"""Floating-point operations of a step, counted in its graph, against numbers by hand."""

import types

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.flops import count_flops, peak_flops
from tests.support import reference_model

# Layer -> products and sums per example and kernel, forward; the gradient of the first kernel costs as
# much again, and that of a later layer's input, too.
DENSE = 2 * 6 * 5 + 2 * 5 * 3  # 6 -> 5 -> 3
DENSE_BACKWARD = 2 * 6 * 5 + 2 * (2 * 5 * 3)


class Trainer(ctl.StandardTrainer):
    layers = staticmethod(lambda: [tf_keras.layers.Dense(5), tf_keras.layers.Dense(3)])
    shape = (6,)

    def build_model(self):
        return tf_keras.Sequential([tf_keras.Input(self.shape), *self.layers()])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": tf.ones([32, *self.shape]).numpy()})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=list(range(1, outputs.shape.rank)))


class Convolution(Trainer):
    # [8, 8, 2] -> [3, 3, 4] -> depthwise [2, 2, 4]
    layers = staticmethod(
        lambda: [tf_keras.layers.Conv2D(4, 3, strides=2), tf_keras.layers.DepthwiseConv2D(2)]
    )
    shape = (8, 8, 2)


class Recurrent(Trainer):
    layers = staticmethod(lambda: [tf_keras.layers.SimpleRNN(3)])
    shape = (4, 6)


def make_trainer(cls, *, replicas=1, steps=1, **options):
    trainer = reference_model.make_trainer(testing.make_strategy(replicas), 8, cls=cls, **options)
    if steps:
        trainer.train(tf.constant(steps))
    return trainer


@pytest.mark.parametrize(
    "options",
    [{"replicas": 2, "micro_batches": 2}, pytest.param({"xla": "loop"}, marks=pytest.mark.slow)],
)
def test_dense_layers_on_any_split(options):
    trainer = make_trainer(Trainer, **options)
    assert count_flops(trainer) == 8 * (DENSE + DENSE_BACKWARD)


def test_convolutions_count_the_window_of_each_output():
    forward = 2 * (3 * 3 * 4) * (3 * 3 * 2) + 2 * (2 * 2 * 4) * (2 * 2)
    backward = 2 * (3 * 3 * 4) * (3 * 3 * 2) + 2 * 2 * (2 * 2 * 4) * (2 * 2)
    assert count_flops(make_trainer(Convolution)) == 8 * (forward + backward)


@pytest.mark.slow
def test_loop_inside_of_a_step_and_a_step_that_is_not_traced_are_unknown():
    assert count_flops(make_trainer(Recurrent)) is None
    assert count_flops(make_trainer(Trainer, steps=0)) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float32", True, 494.7e12),
        ("NVIDIA H100 80GB HBM3", "float32", False, 66.9e12),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", True, None),
        ("NVIDIA GeForce RTX 4090", "float16", True, None),
    ],
)
def test_peak_of_a_gpu(monkeypatch, name, dtype, tf32, peak):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [types.SimpleNamespace()])
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda _: {"device_name": name}
    )
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: tf32)
    assert peak_flops("GPU:0", dtype) == (peak and pytest.approx(peak))


def test_cpu_has_no_known_peak():
    assert peak_flops("CPU:0", "float32") is None
