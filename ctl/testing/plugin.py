"""The fixtures that pytest finds once ctl is installed. Loads no TensorFlow until one is used."""

from collections.abc import Callable
import glob
import os
import pathlib
import time
from typing import Any

import pytest

from ctl.hardware import gpu

_ON_CPUS = {  # name -> row of the table, replicas
    "one_device": ("one_device", 1),
    "mirrored_2": ("mirrored", 2),
    "mirrored_4": ("mirrored", 4),
    "central_storage_2": ("central_storage", 2),
}


def _names() -> list[str]:
    """The strategies that one process on this machine can run, as the GPUs' device files tell."""
    named = gpu.visible_gpus(os.environ)
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if named is None else len(named)
    return [*_ON_CPUS, *(["one_gpu"] if gpus else []), *(["mirrored_gpus"] if gpus > 1 else [])]


@pytest.fixture
def ctl_logical_devices() -> Callable[[int], list[str]]:
    """Splits the CPU: `ctl_logical_devices(4)` -> ["CPU:0", ..., "CPU:3"].

    TensorFlow fixes its devices at first use: call `ctl.testing.split_cpu(4)` in conftest.py if
    another test may come first. The first call makes four at least, for the tests that follow.
    """

    def split(count: int) -> list[str]:
        from ctl.testing import devices

        enough = devices.logical_cpus() >= count
        return devices.split_cpu(count if enough else max(count, 4))[:count]

    return split


@pytest.fixture(params=_names())
def ctl_strategy(
    request: pytest.FixtureRequest, ctl_logical_devices: Callable[[int], list[str]]
) -> Any:
    """Each strategy that one process on this machine can run, one after the other."""
    from ctl.hardware import selection
    from ctl.hardware.strategies import StrategyOptions

    if request.param in _ON_CPUS:
        name, replicas = _ON_CPUS[request.param]
        asked = StrategyOptions(devices=tuple(ctl_logical_devices(4)[:replicas]))
        return selection.build(name, asked).strategy
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("this TensorFlow sees no GPU")
    if request.param == "one_gpu":
        return selection.build("one_device", StrategyOptions(devices=("GPU:0",))).strategy
    return selection.build("mirrored").strategy


@pytest.fixture
def ctl_tiny_trainer() -> Callable[..., Any]:
    """Makes a small trainer: `ctl_tiny_trainer(ctl_strategy, precision="float64")`."""
    from ctl.testing import tiny

    return tiny.tiny_trainer


@pytest.fixture
def ctl_workdir(tmp_path: pathlib.Path) -> Any:
    """An empty `ctl.loop.workdir.Workdir` of the test's own."""
    from ctl.loop.workdir import Workdir

    return Workdir(tmp_path / "run")


class FrozenTime:
    """Time that stands still until the test moves it.

    def test_it(ctl_frozen_time):
        ctl_frozen_time.advance(60)
        time.sleep(5)      # returns at once, five seconds later
    """

    def __init__(self, now: float):
        """Starts at a number of seconds."""
        self.now = now

    def advance(self, seconds: float) -> None:
        """Moves time on; also what `time.sleep` does."""
        self.now += seconds

    def __call__(self) -> float:
        """The seconds that `time.time`, `monotonic` and `perf_counter` all give."""
        return self.now


@pytest.fixture
def ctl_frozen_time(monkeypatch: pytest.MonkeyPatch) -> FrozenTime:
    """Freezes `time.time`, `time.monotonic`, `time.perf_counter` and `time.sleep`."""
    frozen = FrozenTime(time.time())
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, frozen)
    monkeypatch.setattr(time, "sleep", frozen.advance)
    return frozen
