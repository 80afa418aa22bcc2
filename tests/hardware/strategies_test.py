"""config.runtime -> strategy. These processes have four logical CPUs (conftest.py)."""

import dataclasses
import json

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import strategies
from tests import child

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")


def devices(hardware):
    """The short names of a strategy's devices."""
    return [name.rsplit("device:")[-1] for name in hardware.strategy.extended.worker_devices]


@on_cpu
@pytest.mark.parametrize(
    ("name", "count", "chosen", "found", "why"),
    [
        ("auto", 0, "one_device", ["CPU:0"], "auto: no GPU here"),
        ("auto", 1, "one_device", ["CPU:0"], "auto: no GPU here"),
        (
            "auto", 3, "mirrored", ["CPU:0", "CPU:1", "CPU:2"],
            "auto: no GPU here, the CPU split in 3",
        ),
        ("one_device", 0, "one_device", ["CPU:0"], "no GPU here"),
        ("mirrored", 0, "mirrored", ["CPU:0", "CPU:1"], "no GPU here, the CPU split in 2"),
        ("mirrored", 1, "mirrored", ["CPU:0"], "no GPU here"),
        (
            "mirrored", 4, "mirrored", ["CPU:0", "CPU:1", "CPU:2", "CPU:3"],
            "no GPU here, the CPU split in 4",
        ),
    ],
)  # fmt: skip
def test_choice_and_why(name, count, chosen, found, why):
    hardware = strategies.build(name, strategies.Request(logical_devices=count))
    assert (hardware.name, devices(hardware), hardware.why) == (chosen, found, why)
    assert hardware.strategy.num_replicas_in_sync == len(found)


class Gpus:
    """A machine with GPUs, as far as choosing a strategy can tell."""

    def __init__(self, monkeypatch, count):
        self.built = None
        fake = {
            "GPU": [
                tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)
            ],
            "CPU": [tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")],
        }
        logical = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: fake[kind])
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: logical)
        for name, row in strategies.STRATEGIES.items():
            faked = dataclasses.replace(row, build=self.build)
            monkeypatch.setitem(strategies.STRATEGIES, name, faked)

    def build(self, names, request):
        self.built = names


@pytest.mark.parametrize(
    ("gpus", "name", "chosen", "found", "why"),
    [
        (1, "auto", "one_device", ["GPU:0"], "auto: 1 GPU here"),
        (2, "auto", "mirrored", ["GPU:0", "GPU:1"], "auto: 2 GPUs here"),
        (2, "one_device", "one_device", ["GPU:0"], "2 GPUs here"),
        (1, "mirrored", "mirrored", ["GPU:0"], "1 GPU here"),
        (2, "mirrored", "mirrored", ["GPU:0", "GPU:1"], "2 GPUs here"),
    ],
)
def test_choice_and_why_with_gpus(monkeypatch, gpus, name, chosen, found, why):
    machine = Gpus(monkeypatch, gpus)
    hardware = strategies.build(name)
    assert (hardware.name, machine.built, hardware.why) == (chosen, found, why)


def test_names_are_auto_and_the_tables():
    assert ("auto", *strategies.STRATEGIES) == strategies.NAMES
    with pytest.raises(UsageError, match=r"no strategy 'mirorred': choose one of auto, default"):
        strategies.build("mirorred")


@on_cpu
def test_splitting_too_late_is_told():
    with pytest.raises(UsageError) as refused:
        strategies.build("mirrored", strategies.Request(logical_devices=8))
    assert str(refused.value).startswith(
        "runtime.logical_devices is 8, but TensorFlow has started already, with 4 logical CPUs: "
        "let nothing use it before the strategy is built"
    )


@on_cpu
def test_replicas_on_one_chip_reduce_without_collectives():
    small, large = (
        strategies.build("mirrored", strategies.Request(logical_devices=n)).strategy for n in (2, 4)
    )
    for strategy in (small, large, small):
        total = strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
        )
        count = strategy.num_replicas_in_sync
        assert [float(t) for t in strategy.experimental_local_results(total)] == [count] * count


@on_cpu
def test_a_new_process_is_split_as_the_config_says():
    code = (
        "import json, tensorflow as tf\n"
        "from ctl.hardware import strategies\n"
        "built = strategies.build('mirrored')\n"
        "again = strategies.build('mirrored', strategies.Request(logical_devices=2))\n"
        "print(json.dumps([len(tf.config.list_logical_devices('CPU')), built.why, again.why,\n"
        "                  built.strategy.num_replicas_in_sync]))\n"
    )
    process = child.run(["-c", code], TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
    why = "no GPU here, the CPU split in 2"
    assert json.loads(process.stdout) == [2, why, why, 2], process.stderr
