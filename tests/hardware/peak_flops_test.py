"""The peak of a device is known for exactly that device, or not at all."""

import types

import pytest
import tensorflow as tf

from ctl.hardware.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float32", True, 494.7e12),
        ("NVIDIA H100 80GB HBM3", "float32", False, 66.9e12),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", True, None),
        ("NVIDIA H100 PCIe", "bfloat16", True, None),
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
