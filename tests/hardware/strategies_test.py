"""The table of strategies. The test processes have four logical CPUs."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.configs import overrides
from ctl.errors import UsageError
from ctl.hardware import load, selection, strategies
from ctl.hardware.strategies import STRATEGIES, StrategyOptions
from tests.support import child

NO_GPU = not tf.config.list_physical_devices("GPU")
on_cpu = pytest.mark.skipif(not NO_GPU, reason="is about a machine without a GPU")


def test_names_are_auto_and_those_of_the_table():
    assert ("auto", *STRATEGIES) == strategies.NAMES
    for spec in STRATEGIES.values():
        functions = (spec.builder, spec.checker, spec.describer)
        assert all(callable(load(function)) for function in functions if function)
    algorithms = {a for spec in STRATEGIES.values() for a in spec.algorithms}
    assert algorithms | {"auto"} == {*strategies.ALGORITHMS}


def test_options_are_read_from_the_config_and_the_environment():
    assert StrategyOptions.from_config(ctl.config().runtime, {}) == StrategyOptions()
    runtime = ctl.config(
        runtime=dict(
            logical_devices=2,
            devices=["CPU:0"],
            all_reduce=dict(algorithm="ring", bucket_mib=0.5, timeout=4.0),
            cluster=dict(start_timeout=5.0, heartbeat_timeout=7.0, shard_mib=6.0),
            tpu="pod",
        )
    ).runtime
    config = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
    options = StrategyOptions.from_config(runtime, {"TF_CONFIG": config})
    assert options.cluster.name == "worker 1"
    assert options == StrategyOptions(
        2, ("CPU:0",), "ring", 0.5, 4.0, 5.0, 7.0, 6.0, "pod", options.cluster
    )


def test_every_option_is_a_config_key_with_the_same_default():
    defaults = overrides.flatten(ctl.config())
    for field, key in strategies.CONFIG_KEYS.items():
        default = getattr(StrategyOptions(), field)
        assert type(default)(defaults[f"runtime.{key}"]) == default


@on_cpu
@pytest.mark.parametrize("name", ["default", "one_device", "mirrored", "central_storage"])
def test_strategies_are_recognized_by_their_class(name):
    strategy = selection.build(name).strategy
    assert strategies.strategy_name(strategy) == name
    spec = strategies.spec_of(strategy)
    assert (spec.coordinated, spec.remote, spec.multi_process) == (False, False, False)


@pytest.mark.parametrize(
    ("name", "replicas", "device", "uses"),
    [
        ("multi_worker_mirrored", 2, "CPU:0", True),
        ("multi_worker_mirrored", 1, "CPU:0", False),  # reduces nothing
        ("multi_worker_mirrored", 2, "GPU:0", False),
        ("mirrored", 2, "CPU:0", False),  # adds on one device
        ("parameter_server", 2, "CPU:0", False),
    ],
)
def test_processes_on_cpus_reduce_by_collectives(name, replicas, device, uses):
    kind = getattr(tf.distribute, STRATEGIES[name].type)
    strategy = mock.Mock(spec=kind, num_replicas_in_sync=replicas)
    strategy.extended.worker_devices = (f"/job:worker/device:{device}",)
    assert strategies.uses_cpu_collectives(strategy) is uses


@on_cpu
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_replicas_are_added_in_their_order_whichever_operations_have_run(name):
    """tf.add_n begins with an input that no other operation reads any more, here with the third."""
    strategy = selection.build(name, StrategyOptions(logical_devices=4)).strategy
    numbers = np.random.default_rng(0).normal(size=[4, 1000]).astype(np.float32)

    def contribute(numbers):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return 3.0 * tf.gather(numbers, replica)

    @tf.function
    def add(numbers):
        values = strategy.run(contribute, args=(numbers,))
        *read_later, third, fourth = strategy.experimental_local_results(values)
        with tf.control_dependencies([tf.cos(third), tf.cos(fourth)]):
            (total,) = strategy.extended.batch_reduce_to("SUM", [(values, values)])
        total = strategy.experimental_local_results(total)[0]
        with tf.control_dependencies([total]):
            return total, [tf.cos(value) for value in read_later]

    one, two, three, four = np.float32(3) * numbers
    np.testing.assert_array_equal(add(tf.constant(numbers))[0], one + two + three + four)


@on_cpu
def test_nccl_between_logical_devices_is_rejected():
    with pytest.raises(
        UsageError, match=r"=nccl requires .* GPU per replica, .* on CPU:0, CPU:1: "
    ):
        selection.build("mirrored", StrategyOptions(logical_devices=2, algorithm="nccl"))


_THREADS = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import tensorflow as tf
from ctl.hardware import several_processes
several_processes.reserve_threads()
first = tf.config.threading.get_inter_op_parallelism_threads()
tf.config.threading.set_inter_op_parallelism_threads(2)
several_processes.reserve_threads()
second = tf.config.threading.get_inter_op_parallelism_threads()
tf.config.threading.set_inter_op_parallelism_threads(0)
tf.constant(1.0)
several_processes.reserve_threads()
print(first, second, tf.config.threading.get_inter_op_parallelism_threads())
"""


@pytest.mark.slow
def test_process_on_one_core_gets_threads_for_collectives_unless_the_user_set_their_number():
    done = child.run(["-c", _THREADS], fork=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "2", "0"]
