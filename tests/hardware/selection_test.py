"""The strategy that is chosen for a config. The test processes have four logical CPUs."""

import json
import re

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware import cluster, selection, strategies
from ctl.hardware.strategies import StrategyOptions
from tests.support import child

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")
WORKERS = cluster.make_local_clusters(workers=2, servers=0, ports=[1, 2])[0]
SERVERS = cluster.make_local_clusters(workers=2, servers=1, ports=[1, 2, 3, 4])[0]


def devices(hardware):
    """The short names of a strategy's devices."""
    return [name.rsplit("device:")[-1] for name in hardware.strategy.extended.worker_devices]


@on_cpu
@pytest.mark.parametrize(
    ("requested", "count", "name", "names", "reason"),
    [
        ("auto", 0, "one_device", ["CPU:0"], "auto: no GPU"),
        ("auto", 3, "mirrored", ["CPU:0", "CPU:1", "CPU:2"], "auto: no GPU, CPU split into 3"),
        ("one_device", 0, "one_device", ["CPU:0"], "no GPU"),
        ("mirrored", 0, "mirrored", ["CPU:0", "CPU:1"], "no GPU, CPU split into 2"),
        ("mirrored", 1, "mirrored", ["CPU:0"], "no GPU"),
    ],
)  # fmt: skip
def test_strategy_devices_and_reason(requested, count, name, names, reason):
    hardware = selection.build(requested, StrategyOptions(logical_devices=count))
    assert (hardware.name, devices(hardware), hardware.reason) == (name, names, reason)
    assert hardware.strategy.num_replicas_in_sync == len(names)


class Gpus:
    """A machine with GPUs, as far as the selection of a strategy can detect."""

    def __init__(self, monkeypatch, count):
        self.built = None
        gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)]
        physical = {"GPU": gpus, "CPU": [tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")]}
        logical = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: physical[kind])
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: logical)

        def build(spec, names, options):
            self.built = names

        monkeypatch.setattr(strategies.StrategySpec, "build", build)


@pytest.mark.parametrize(
    ("gpus", "requested", "name", "names", "reason"),
    [
        (1, "auto", "one_device", ["GPU:0"], "auto: 1 GPU"),
        (2, "auto", "mirrored", ["GPU:0", "GPU:1"], "auto: 2 GPUs"),
        (2, "one_device", "one_device", ["GPU:0"], "2 GPUs"),
        (2, "mirrored", "mirrored", ["GPU:0", "GPU:1"], "2 GPUs"),
    ],
)
def test_strategy_devices_and_reason_with_gpus(monkeypatch, gpus, requested, name, names, reason):
    machine = Gpus(monkeypatch, gpus)
    hardware = selection.build(requested)
    assert (hardware.name, machine.built, hardware.reason) == (name, names, reason)


@pytest.mark.parametrize(
    ("cluster", "name", "reason"),
    [
        (WORKERS, "multi_worker_mirrored", "auto: worker 0 of 2 processes"),
        (SERVERS, "parameter_server", "auto: chief of 4 processes"),
    ],
)
def test_auto_is_a_strategy_for_the_cluster(monkeypatch, cluster, name, reason):
    Gpus(monkeypatch, 0)
    hardware = selection.build("auto", StrategyOptions(cluster=cluster))
    assert (hardware.name, hardware.reason, hardware.cluster) == (name, reason, cluster)
    assert hardware.is_chief


@on_cpu
def test_an_unknown_name_and_options_that_do_not_fit_the_chosen_strategy_are_rejected():
    with pytest.raises(UsageError, match=r"no strategy 'mirorred': choose one of auto, default"):
        selection.build("mirorred")
    with pytest.raises(UsageError, match=r"timeout .*runtime\.strategy=one"):
        selection.build("auto", StrategyOptions(timeout=2.0))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mirrored", dict(cluster=WORKERS), "runs in one process, but this is one of 2"),
        ("parameter_server", dict(cluster=WORKERS), "with parameter servers, but this .* has none"),
        ("multi_worker_mirrored", dict(cluster=SERVERS), "without parameter servers, but .* some"),
        ("parameter_server", {}, r"TF_CONFIG is not set: .*ctl launch --workers=2 --ps=1 -- "),
        ("default", dict(devices=("CPU:0",)), r"runtime\.devices has no effect"),
        ("mirrored", dict(shard_mib=1.0), r"runtime\.cluster\.shard_mib has no effect"),
        ("mirrored", dict(algorithm="ring"), "is 'ring', but .* requires one of auto, nccl, hier"),
        ("one_device", dict(bucket_mib=1.0), r"runtime\.all_reduce\.bucket_mib has no effect"),
        ("mirrored", dict(bucket_mib=1.0), "bucket_mib has no effect"),
        ("tpu", dict(bucket_mib=1.0), "bucket_mib has no effect"),
        ("parameter_server", dict(bucket_mib=1.0, cluster=SERVERS), "bucket_mib has no effect"),
    ],
)
def test_options_that_do_not_fit_the_strategy_are_rejected(name, options, words):
    with pytest.raises(UsageError, match=rf"runtime\.strategy={name}\b") as error:
        selection.resolve_name(name, StrategyOptions(**options))
    assert re.search(words, str(error.value))


@on_cpu
def test_splitting_after_tensorflow_has_started_is_rejected():
    words = "=mirrored splits the CPU into 8 .*with 4 logical CPUs: create no tensor before"
    with pytest.raises(UsageError, match=words):
        selection.build("mirrored", StrategyOptions(devices=("CPU:7",)))


@pytest.mark.slow
@on_cpu
def test_a_new_process_is_split_as_configured():
    code = (
        "import json, tensorflow as tf\n"
        "from ctl.hardware import selection\n"
        "from ctl.hardware.strategies import StrategyOptions\n"
        "built = selection.build('mirrored')\n"
        "again = selection.build('mirrored', StrategyOptions(logical_devices=2))\n"
        "print(json.dumps([len(tf.config.list_logical_devices('CPU')), built.reason,\n"
        "                  again.reason, built.strategy.num_replicas_in_sync]))\n"
    )
    process = child.run(["-c", code], fork=True, CUDA_VISIBLE_DEVICES="-1")
    reason = "no GPU, CPU split into 2"
    assert json.loads(process.stdout) == [2, reason, reason, 2], process.stderr
