"""Runs a comparison in a process of its own, whatever the calling one did to TensorFlow."""

from collections.abc import Sequence

import tensorflow as tf

from ctl.testing import processes, trial
from ctl.testing.devices import logical_cpus, split_cpu
from ctl.testing.recording import Plan
from ctl.testing.report import Report
from ctl.testing.splits import Split

_TIMEOUT = 600.0  # seconds


def is_ready(devices: int) -> bool:
    """Whether TensorFlow in this process is as a comparison needs it, without starting it.

    Args:
        devices: logical CPUs that are wanted.
    """
    return (
        logical_cpus() >= devices
        and tf.executing_eagerly()
        and not tf.config.functions_run_eagerly()
        and not tf.distribute.has_strategy()
        and tf.config.get_soft_device_placement()
        and not tf.config.optimizer.get_jit()
    )


def run(plan: Plan, chosen: Sequence[Split]) -> Report:
    """Compares splits in a child process.

    Args:
        plan: what to run; it must pickle.
        chosen: the splits.

    Raises:
        UsageError: the trainer cannot be sent, or nothing can be compared.
        AssertionError: the child failed; its output is in the message.
    """
    found: Report = processes.call(_compare, [plan, list(chosen)], timeout=_TIMEOUT)[0]
    return found


def _compare(plan: Plan, chosen: Sequence[Split]) -> Report:
    split_cpu(max(split.replicas for split in chosen))
    return trial.run(plan, chosen)
