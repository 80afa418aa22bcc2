"""How a GPU is split into logical devices, and its memory with it."""

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import devices


def test_memory_of_a_gpu_that_nobody_tells_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"nvidia-smi did not tell it: set runtime\.logical_dev"):
        devices._gpu_memory_mib(tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"))


def test_parts_of_a_gpu_share_nine_tenths_of_its_memory(monkeypatch):
    asked = []

    def smi(query, **_):
        asked.append(query[-1])
        return devices.subprocess.CompletedProcess(query, 0, stdout="1000\n")

    device = tf.config.PhysicalDevice("/physical_device:GPU:3", "GPU")
    monkeypatch.setattr(devices.subprocess, "run", smi)
    assert devices._gpu_memory_mib(device) == 900
    assert asked == ["3"]


def test_a_gpu_is_split_into_equal_parts(monkeypatch):
    split = {}
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(devices, "_gpu_memory_mib", lambda device: 900)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", split.__setitem__)
    devices._split(device, 4)
    assert [part.memory_limit for part in split[device]] == [225] * 4
