"""Runs a comparison in a process of its own, whatever the calling one did to TensorFlow."""

from collections.abc import Sequence
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing.recording import Plan
from ctl.testing.report import Report
from ctl.testing.splits import Split

_TIMEOUT = 600.0  # seconds
_LINES = 30  # of its output, for the failure message


def is_ready(devices: int) -> bool:
    """Whether TensorFlow in this process is as a comparison needs it, without starting it.

    Args:
        devices: logical CPUs that are wanted.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    there = tf.config.get_logical_device_configuration(cpu) or []
    return (
        len(there) >= devices
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
        UsageError: the trainer cannot be sent, or the child told a mistake.
        RuntimeError: the child failed; its output is in the message.
    """
    task = _pickled(plan, chosen)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "task").write_bytes(task)
        done = subprocess.run(
            [sys.executable, "-m", "ctl.testing.child", folder],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
        )
        if not (path / "result").exists():
            output = "\n".join(done.stdout.splitlines()[-_LINES:])
            raise RuntimeError(
                f"The comparison's process ended with {done.returncode}, and said:\n{output}"
            )
        result = pickle.loads((path / "result").read_bytes())
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Report)
    return result


def _pickled(plan: Plan, chosen: Sequence[Split]) -> bytes:
    wrong = None
    if getattr(plan.make, "__module__", "") == "__main__":
        wrong = "it is defined in the program itself"
    try:
        if wrong is None:
            # The path apart and first: what follows is read by it.
            return pickle.dumps(sys.path) + pickle.dumps((plan, list(chosen)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        wrong = " ".join(str(error).split())
    raise UsageError(
        f"{plan.name} cannot be sent to a process of its own ({wrong}): define the trainer and what "
        "it is made with at the top level of a module, or give this process the devices from the "
        "start: ctl.testing.split_cpu(4) in conftest.py."
    )


def _environment() -> dict[str, str]:
    """Without the caller's settings of TensorFlow, and without GPUs, which are not used."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "XLA_"))}
    return {**kept, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
