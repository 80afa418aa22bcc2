"""Which versions of TensorFlow ctl accepts."""

import importlib.metadata

import pytest

from ctl import main
from ctl.errors import UsageError
from ctl.hardware import versions


def finder(**found):
    def find(name):
        try:
            return found[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    return find


@pytest.mark.parametrize("version", ["2.18.0", "2.20.0", "2.21.0", "2.22.0rc0"])
@pytest.mark.parametrize("name", ["tensorflow", "tensorflow_cpu", "tensorflow_tpu"])
def test_supported_versions_are_accepted(name, version):
    versions.check(finder(**{name: version}))


@pytest.mark.parametrize("version", ["2.17.1", "2.23.0.dev20261026", "3.0.0"])
def test_another_version_is_one_line(version):
    with pytest.raises(
        UsageError, match=rf"2\.18 to 2\.22, but tensorflow-cpu {version} is .* pip"
    ):
        versions.check(finder(tensorflow_cpu=version))


@pytest.mark.parametrize("missing", ["tensorflow", "tf_keras", "orbit"])
def test_missing_package_is_one_line_with_a_command(missing, monkeypatch):
    find = versions.importlib.util.find_spec
    monkeypatch.setattr(
        versions.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(UsageError, match=f"{missing}|TensorFlow is not installed: pip install"):
        versions.check(finder(**({} if missing == "tensorflow" else {"tensorflow": "2.20.0"})))


def test_program_exits_with_2_before_tensorflow_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(versions.check, "__defaults__", (finder(tensorflow="2.17.0"),))
    assert main.run(["ctl", "devices", "experiments/mnist.py"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tensorflow 2.17.0 is installed: pip install" in error
