"""Logical CPUs and the strategies on them; tests/support/process.py has split the CPU into four."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.errors import UsageError
from ctl.testing import logical_devices
from tests.support import child


def test_split_that_exists_is_reused_and_cannot_be_changed():
    assert testing.split_cpu(2) == ["CPU:0", "CPU:1"]
    assert logical_devices.count_logical_cpus() == 4
    message = r"with 4 logical CPUs, but 5 are required: call ctl\.testing"
    with pytest.raises(UsageError, match=message):
        testing.split_cpu(5)
    with pytest.raises(UsageError, match="replicas is 0, but must be at least 1"):
        testing.make_strategy(0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_strategy_has_the_number_of_replicas(replicas):
    strategy = testing.make_strategy(replicas)
    assert strategy.num_replicas_in_sync == replicas
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    copies = testing.copies(strategy, variable)
    assert len(copies) == replicas
    for copy in copies:
        np.testing.assert_array_equal(copy, [1.0, 2.0])


STRATEGIES = """
import tensorflow as tf
from ctl import testing
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions

SPLIT
for replicas in REPLICAS:
    assert testing.make_strategy(replicas).num_replicas_in_sync == replicas
assert len(tf.config.list_logical_devices("CPU")) == 4
hardware = selection.build("mirrored", StrategyOptions(logical_devices=2))
assert hardware.strategy.num_replicas_in_sync == 2
"""
BY_USER = (
    'tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], '
    "[tf.config.LogicalDeviceConfiguration()] * 4)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "replicas"), [(BY_USER, (2, 4)), ("testing.split_cpu(4)", (4, 2))]
)
def test_strategy_on_some_of_the_logical_cpus_leaves_the_others(split, replicas):
    # A process of its own, because TensorFlow's devices of this one are initialized.
    code = STRATEGIES.replace("SPLIT", split).replace("REPLICAS", str(replicas))
    process = child.run(["-c", code], fork=True, CUDA_VISIBLE_DEVICES="-1")
    assert process.returncode == 0, process.stderr
