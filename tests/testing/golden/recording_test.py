"""What a recording measures."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing.golden import recording
from tests.testing.golden.trainers import STEPS, curve, make, recorded


@pytest.mark.slow
def test_a_recording_has_the_curve_of_a_run_and_can_be_repeated():
    golden = recorded()
    assert golden.repeatable and len(golden.steps) == STEPS
    assert list(golden.tensors) == [
        "dense/kernel:0", "dense/bias:0", "dense_1/kernel:0", "dense_1/bias:0",
    ]  # fmt: skip
    # A run without repetitions has the same bits: creating the slots beforehand changes nothing.
    for step, expected in zip(curve().steps, golden.steps, strict=True):
        assert (step.loss, step.bits, step.other_bits) == (
            expected.loss,
            expected.bits,
            expected.other_bits,
        )


def test_the_tolerance_is_larger_than_a_rounding_error_and_much_smaller_than_the_update():
    for step in recorded().steps:
        assert 0 < step.loss_tolerance < 1e-3 * step.loss
        assert 2.0**-21 * step.update[0] < step.tolerance[0] < 0.1 * step.update[0]


def test_numbers_of_a_tensor():
    values = {("update", "w"): np.array([[3.0, 4.0]], np.float32), ("state", "n"): np.array(7)}
    before = {("update", "w"): np.array([[3.0, 1.0]], np.float32), ("state", "n"): np.array(6)}
    step = recording._describe(0.5, values, before)
    assert (step.loss, step.update) == (0.5, [3.0])
    other = recording._describe(0.5, {**values, ("state", "n"): np.array(8)}, before)
    assert other.bits == step.bits and other.other_bits != step.other_bits


def test_data_of_ones_own_cannot_be_recorded_but_compared():
    trainer = make()
    trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensors(
            {"x": tf.ones([8, 4]), "label": tf.zeros([8], tf.int32)}
        ).repeat(9)
    )
    with pytest.raises(UsageError, match="which a train_dataset of your own does not allow"):
        recording.record(trainer, 2, measure_tolerance=True)
    assert recording.record(trainer, 2, measure_tolerance=False).steps[0].batch == {}


def test_what_determines_the_bits_is_recorded(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    trainer = make(replicas=2, seed=3, model={"width": 4})
    described = recording.describe_environment(trainer)
    assert described["tensorflow"] == tf.__version__ and described["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert described["devices"] == "CPU" and described["CPU"] and int(described["threads"]) >= 1
    assert (described["replicas"], described["strategy"]) == ("2", "mirrored")
    assert described["seed"] == "3" and described["model.width"] == "4"
    assert described["optimizer"] == "Adam"
    sharded = recording.describe_environment(make(replicas=2, logical_shards=2))
    assert "replicas" not in sharded and sharded["runtime.logical_shards"] == "2"


def test_the_model_of_a_gpu_is_recorded(monkeypatch):
    trainer = make()
    assert not {"GPU", "TensorFloat-32"} & recording.describe_environment(trainer).keys()
    details = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
    monkeypatch.setattr(recording.devices, "replica_devices", lambda _: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["a", "b"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    described = recording.describe_environment(trainer)
    assert described["GPU"] == "NVIDIA H100, compute capability 9.0"
    assert described["TensorFloat-32"] == "True"
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: {})
    assert "unknown model" in recording.describe_environment(trainer)["GPU"]
