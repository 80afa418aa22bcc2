"""Logical CPUs and the strategies on them; conftest.py has split the CPU into four."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import testing
from ctl.errors import UsageError
from ctl.testing import devices


def test_split_that_exists_is_reused():
    assert testing.split_cpu(2) == ["CPU:0", "CPU:1"]
    assert devices.count_logical_cpus() == 4


def test_split_after_tensorflow_was_used_is_an_error():
    with pytest.raises(
        UsageError, match=r"with 4 logical CPUs, but 5 are required: call ctl\.testing"
    ):
        testing.split_cpu(5)


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
