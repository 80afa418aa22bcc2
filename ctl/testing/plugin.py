"""The pytest fixtures that ctl installs."""

from collections.abc import Callable
import glob
import pathlib
from typing import Any

import pytest

from ctl.hardware import gpu

_CPU_STRATEGIES = {  # parameter -> name of the strategy, replicas
    "one_device": ("one_device", 1),
    "mirrored_2": ("mirrored", 2),
    "mirrored_4": ("mirrored", 4),
    "central_storage_2": ("central_storage", 2),
}


def _strategy_names() -> list[str]:
    """Returns the strategies that one process on this machine can run.

    pytest needs them when it collects the tests, so GPUs are counted without TensorFlow.
    """
    visible = gpu.visible_gpus()
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len(visible)
    return [*_CPU_STRATEGIES, *["one_gpu"] * (gpus > 0), *["mirrored_gpus"] * (gpus > 1)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that records golden curves."""
    parser.getgroup("ctl").addoption(
        "--update_golden",
        action="store_true",
        help="record the golden files of ctl.testing.assert_curve again, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Passes the option to `assert_curve`, including the processes of pytest-xdist."""
    if config.getoption("--update_golden"):
        environment = pytest.MonkeyPatch()
        environment.setenv("CTL_UPDATE_GOLDEN", "1")
        # A later pytest.main of the same process must not record.
        config.add_cleanup(environment.undo)


@pytest.fixture
def ctl_logical_devices() -> Callable[[int], list[str]]:
    """Splits the CPU: `ctl_logical_devices(4)` -> ["CPU:0", ..., "CPU:3"].

    TensorFlow fixes its devices at first use: call `ctl.testing.split_cpu(4)` in conftest.py if
    another test may use it first. The first call makes at least four, for the tests that follow.
    """

    def split(count: int) -> list[str]:
        from ctl.testing import logical_devices

        enough = logical_devices.count_logical_cpus() >= count
        return logical_devices.split_cpu(count if enough else max(count, 4))[:count]

    return split


@pytest.fixture(params=_strategy_names())
def ctl_strategy(
    request: pytest.FixtureRequest, ctl_logical_devices: Callable[[int], list[str]]
) -> Any:
    """Runs the test under each strategy that one process on this machine can run."""
    from ctl.hardware import selection
    from ctl.hardware.strategies import StrategyOptions

    if request.param in _CPU_STRATEGIES:
        name, replicas = _CPU_STRATEGIES[request.param]
        devices = tuple(ctl_logical_devices(4)[:replicas])
        return selection.build(name, StrategyOptions(devices=devices)).strategy
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("this installation of TensorFlow finds no GPU")
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
    """Returns an empty `ctl.loop.workdir.Workdir` for this test."""
    from ctl.loop.workdir import Workdir

    return Workdir(tmp_path / "run")
