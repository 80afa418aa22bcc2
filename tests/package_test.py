"""The wheel, and the places that name the version."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import orbit
import pytest
import tf_keras

import ctl
from tests import child


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The files of the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "vendored.txt", "README.md", "LICENSE"):
        shutil.copy(child.ROOT / name, source)
    shutil.copytree(
        child.ROOT / "ctl", source / "ctl", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (path,) = (source / "dist").iterdir()
    assert path.name == f"ctl_tensorflow-{ctl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.slow  # the build downloads packages
def test_wheel_contains_the_package_and_nothing_else(wheel):
    folders = {name.partition("/")[0] for name in wheel}
    assert folders == {"ctl", "ctl_vendored.pth", f"ctl_tensorflow-{ctl.__version__}.dist-info"}
    files = {p.relative_to(child.ROOT).as_posix() for p in (child.ROOT / "ctl").rglob("*")}
    expected = {f for f in files if (child.ROOT / f).is_file() and "__pycache__" not in f}
    assert {name for name in wheel if re.match("ctl/(?!_vendored/)", name)} == expected


@pytest.mark.slow
def test_wheel_has_unmodified_tf_keras_and_orbit_at_the_end_of_the_path(wheel):
    assert wheel["ctl_vendored.pth"] == b"ctl/_vendored\n"
    names = {name for name in wheel if name.startswith("ctl/_vendored/")}
    assert {name.split("/")[2] for name in names} == {
        "orbit",
        "tf_keras",
        "tf_models_official-2.19.1",  # its license; with .dist-info, it would be a distribution
    }
    for package in (tf_keras, orbit):
        folder = pathlib.Path(package.__file__).parent
        files = [p for p in folder.rglob("*.py") if not p.name.endswith("_test.py")]
        files = [p for p in files if "examples" not in p.parts]
        relative = {f"ctl/_vendored/{p.relative_to(folder.parent).as_posix()}" for p in files}
        assert relative == {n for n in names if n.split("/")[2] == folder.name}
    keras = pathlib.Path(tf_keras.__file__).parent
    assert wheel["ctl/_vendored/tf_keras/src/backend.py"] == (keras / "src/backend.py").read_bytes()


@pytest.mark.slow
def test_wheel_has_type_hints_and_a_console_script(wheel):
    assert "ctl/py.typed" in wheel
    (entry_points,) = (text for name, text in wheel.items() if name.endswith("entry_points.txt"))
    assert b"ctl = ctl.main:console" in entry_points


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.*)$"),
        ("CHANGELOG.md", r"^## ([\d.]+)"),
        ("deploy/Dockerfile", r"-t ctl:([\d.]+)"),
        ("deploy/kubernetes/README.md", r"-t ctl:([\d.]+)"),
        ("deploy/kubernetes/multi-worker.yaml", r"image: ctl:([\d.]+)"),
        ("deploy/kubernetes/parameter-server.yaml", r"image: ctl:([\d.]+)"),
        ("deploy/kubernetes/jobset.yaml", r"image: ctl:([\d.]+)"),
        ("deploy/kubernetes/tfjob.yaml", r"image: ctl:([\d.]+)"),
        ("deploy/kubernetes/tpu.yaml", r"image: ctl:([\d.]+)"),
    ],
)
def test_version_is_that_of_the_package(file, pattern):
    versions = re.findall(pattern, (child.ROOT / file).read_text(), re.MULTILINE)
    assert versions and versions[0] == ctl.__version__
    assert file == "CHANGELOG.md" or set(versions) == {ctl.__version__}
