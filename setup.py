"""Adds unmodified copies of tf_keras and of Orbit to the wheel and the sdist, in ctl/_vendored.

As distributions of the index they cannot be requirements: tf-keras requires `tensorflow`, which
overwrites other builds of TensorFlow, and tf-models-official requires one version of TensorFlow and 80
packages that Orbit never imports. ctl/__init__.py adds the folder to the end of sys.path where one of
them is not installed. A wheel that is built from the sdist needs no package index.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_FOLDER = pathlib.Path("ctl/_vendored")
_PACKAGES = ("tf_keras/", "orbit/")
_LEFT_OUT = ("_test.py", "/examples/")


def add_copies(root: pathlib.Path) -> None:
    """Adds the copies: those of an sdist, or of the wheels in vendored.txt, whose hashes are checked."""
    target = root / _FOLDER
    shutil.rmtree(target, ignore_errors=True)
    if _FOLDER.is_dir():
        shutil.copytree(_FOLDER, target)
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--require-hashes"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*pip, "--dest", folder, "--requirement", "vendored.txt"])
        if done.returncode:
            sys.exit(
                "ctl cannot be built: the wheels in vendored.txt could not be downloaded. Build where "
                "pip reaches a package index, or from the sdist, which contains them."
            )
        for wheel in pathlib.Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                _extract(file, target)


def _extract(wheel: zipfile.ZipFile, target: pathlib.Path) -> None:
    has_license = False
    for entry in wheel.infolist():
        name = entry.filename
        is_license = "/licenses/" in name
        has_license |= is_license
        if (is_license or name.startswith(_PACKAGES)) and not any(p in name for p in _LEFT_OUT):
            # A folder *.dist-info on sys.path would be a distribution without metadata.
            entry.filename = name.replace(".dist-info/", "/")
            wheel.extract(entry, target)
    if (
        not has_license
    ):  # the wheel of tf-keras names the Apache License 2.0, and does not contain it
        distribution = "-".join(pathlib.Path(str(wheel.filename)).name.split("-")[:2])
        (target / distribution / "licenses").mkdir(parents=True)
        shutil.copy("LICENSE", target / distribution / "licenses")


class BuildWithCopies(build_py):
    """Builds the packages, and adds the copies."""

    def run(self):
        """Builds; an editable installation has no copies."""
        super().run()
        if not self.editable_mode:
            add_copies(pathlib.Path(self.build_lib))


class SourcesWithCopies(sdist):
    """Collects the sources, and adds the copies."""

    def make_release_tree(self, base_dir, files):
        """Makes the tree of the archive."""
        super().make_release_tree(base_dir, files)
        add_copies(pathlib.Path(base_dir))


setup(cmdclass={"build_py": BuildWithCopies, "sdist": SourcesWithCopies})
