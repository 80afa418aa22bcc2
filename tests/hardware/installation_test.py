"""The versions of TensorFlow that ctl accepts, and the variables that are set for its import."""

import importlib.metadata

import pytest

from ctl import main
from ctl.errors import UsageError
from ctl.hardware import installation


@pytest.fixture
def install(monkeypatch):
    """Replaces the versions of the packages that are installed."""

    def install(**found):
        def version(name):
            try:
                return found[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


@pytest.mark.parametrize(
    ("name", "version"),
    [("tensorflow", "2.18.0"), ("tensorflow_cpu", "2.21.0"), ("tensorflow_tpu", "2.22.0rc0")],
)
def test_supported_versions_are_accepted(name, version, install):
    install(**{name: version})
    installation.check()


@pytest.mark.parametrize("version", ["2.17.1", "2.23.0.dev20261026", "3.0.0"])
def test_another_version_is_one_line(version, install):
    install(tensorflow_cpu=version)
    with pytest.raises(UsageError, match=rf"2\.18 to 2\.22, but tensorflow-cpu {version} is "):
        installation.check()


@pytest.mark.parametrize("missing", ["tensorflow", "tf_keras", "orbit"])
def test_missing_package_is_one_line_with_a_command(missing, install, monkeypatch):
    util = installation.importlib.util
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == missing else find(name))
    install(**({} if missing == "tensorflow" else {"tensorflow": "2.20.0"}))
    with pytest.raises(UsageError, match=f"{missing}|TensorFlow is not installed: pip install"):
        installation.check()


def test_program_exits_with_2_before_tensorflow_is_imported(install, capsys):
    install(tensorflow="2.17.0")
    assert main.run(["ctl", "devices", "experiments/mnist.py"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tensorflow 2.17.0 is installed: pip install" in error


TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, "2"),
        ({"TF_CONFIG": "{"}, "2"),  # a mistake, which is reported later
        ({"TF_CONFIG": TF_CONFIG}, "3"),
        ({"TF_CONFIG": TF_CONFIG, "CUDA_VISIBLE_DEVICES": "0"}, "2"),
        ({"TF_CONFIG": TF_CONFIG, "TF_CPP_MIN_LOG_LEVEL": "1"}, "1"),
    ],
)
def test_errors_around_the_line_of_a_lost_worker_are_hidden(environment, level, monkeypatch):
    devices = environment.get("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    installation.set_variables(environment)
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == level
