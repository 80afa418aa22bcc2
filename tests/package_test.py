"""The wheel, and the places that name the version."""

import os
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
from tests.support import child


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder of an sdist, unpacked."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "vendored.txt", "README.md", "LICENSE"):
        shutil.copy(child.ROOT / name, source)
    shutil.copytree(
        child.ROOT / "ctl", source / "ctl", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.unpack_archive(build(source, "sdist"), source / "unpacked")
    return source / "unpacked" / f"ctl_tensorflow-{ctl.__version__}"


@pytest.fixture(scope="module")
def wheel_file(sdist):
    """A wheel that is built from the sdist without a package index."""
    return build(sdist, "wheel", PIP_NO_INDEX="1", PIP_NO_CACHE_DIR="1")


@pytest.fixture(scope="module")
def wheel(wheel_file):
    """The files of the wheel."""
    assert wheel_file.name == f"ctl_tensorflow-{ctl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel_file) as file:
        return {name: file.read(name) for name in file.namelist()}


def build(source, kind, **variables):
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    command = [sys.executable, "-c", code]
    subprocess.run(
        command, cwd=source, check=True, capture_output=True, env={**os.environ, **variables}
    )
    (path,) = (source / "dist").iterdir()
    return path


@pytest.mark.slow
def test_build_without_index_is_one_line(sdist, tmp_path):
    shutil.copytree(sdist, tmp_path / "source", ignore=shutil.ignore_patterns("_vendored", "dist"))
    shutil.copy(child.ROOT / "vendored.txt", tmp_path / "source")
    with pytest.raises(subprocess.CalledProcessError) as error:
        build(tmp_path / "source", "wheel", PIP_NO_INDEX="1", PIP_NO_CACHE_DIR="1")
    assert error.value.stderr.splitlines()[-1].startswith(
        b"ctl cannot be built: the wheels in vend"
    )


@pytest.mark.slow  # the build downloads packages
def test_wheel_contains_the_package_and_nothing_else(wheel):
    folders = {name.partition("/")[0] for name in wheel}
    assert folders == {"ctl", f"ctl_tensorflow-{ctl.__version__}.dist-info"}  # no *.pth
    files = {p.relative_to(child.ROOT).as_posix() for p in (child.ROOT / "ctl").rglob("*")}
    expected = {f for f in files if (child.ROOT / f).is_file() and "__pycache__" not in f}
    assert {name for name in wheel if re.match("ctl/(?!_vendored/)", name)} == expected
    assert "ctl/py.typed" in wheel
    (entry_points,) = (text for name, text in wheel.items() if name.endswith("entry_points.txt"))
    assert b"ctl = ctl.main:console" in entry_points


@pytest.mark.slow
def test_wheel_has_unmodified_tf_keras_and_orbit_with_their_licenses(wheel):
    names = {name for name in wheel if name.startswith("ctl/_vendored/")}
    licenses = ("tf_keras-2.20.1", "tf_models_official-2.19.1")  # no *.dist-info: no distributions
    assert {name.split("/")[2] for name in names} == {"orbit", "tf_keras", *licenses}
    for folder in licenses:
        assert b"Apache License" in wheel[f"ctl/_vendored/{folder}/licenses/LICENSE"]
    for package in (tf_keras, orbit):
        folder = pathlib.Path(package.__file__).parent
        files = [p for p in folder.rglob("*.py") if not p.name.endswith("_test.py")]
        files = [p for p in files if "examples" not in p.parts]
        relative = {f"ctl/_vendored/{p.relative_to(folder.parent).as_posix()}" for p in files}
        assert relative == {n for n in names if n.split("/")[2] == folder.name}
    keras = pathlib.Path(tf_keras.__file__).parent
    assert wheel["ctl/_vendored/tf_keras/src/backend.py"] == (keras / "src/backend.py").read_bytes()


@pytest.mark.slow
def test_copies_are_found_after_what_is_installed(wheel_file, tmp_path):
    with zipfile.ZipFile(wheel_file) as file:
        file.extractall(tmp_path)
    (tmp_path / "installed/orbit").mkdir(parents=True)
    (tmp_path / "installed/orbit/__init__.py").touch()
    code = (
        "import sys; sys.path[:0] = {!r}; import ctl, importlib.util as u\n"
        "print(u.find_spec('tf_keras').origin, u.find_spec('orbit').origin, sys.path[-1])"
    )

    def find(*folders):
        paths = [str(tmp_path), *map(str, folders)]
        command = [sys.executable, "-S", "-c", code.format(paths)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    copies = tmp_path / "ctl/_vendored"
    keras, own_orbit = (str(copies / name / "__init__.py") for name in ("tf_keras", "orbit"))
    assert find() == [keras, own_orbit, str(copies)]
    orbit_file = tmp_path / "installed/orbit/__init__.py"
    assert find(tmp_path / "installed") == [keras, str(orbit_file), str(copies)]
    (tmp_path / "installed/tf_keras").mkdir()
    (tmp_path / "installed/tf_keras/__init__.py").touch()
    assert find(tmp_path / "installed")[2] != str(copies)


MANIFESTS = ("multi-worker", "parameter-server", "jobset", "tfjob", "tpu")


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.*)$"),
        ("CHANGELOG.md", r"^## ([\d.]+)"),
        ("deploy/Dockerfile", r"-t ctl:([\d.]+)"),
        ("deploy/kubernetes/README.md", r"-t ctl:([\d.]+)"),
        *((f"deploy/kubernetes/{name}.yaml", r"image: ctl:([\d.]+)") for name in MANIFESTS),
    ],
)
def test_version_is_that_of_the_package(file, pattern):
    versions = re.findall(pattern, (child.ROOT / file).read_text(), re.MULTILINE)
    assert versions and versions[0] == ctl.__version__
    assert file == "CHANGELOG.md" or set(versions) == {ctl.__version__}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_outputs_of_the_learning_path_are_those_of_the_wheel(wheel_file, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # The packages that ctl requires are those of this environment.
    others = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    programs = tmp_path / "env/bin"
    install = [str(programs / "pip"), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", str(wheel_file)], check=True)
    flags = [f"--bin={programs}", f"--folder={tmp_path / 'reader'}"]
    done = child.run(["-m", "docs.outputs", *flags], timeout=7000)
    assert done.returncode == 0, done.stdout + done.stderr
