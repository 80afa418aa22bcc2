"""Adds unmodified copies of tf_keras and of Orbit to the wheel, in the folder ctl/_vendored.

As distributions of the index they cannot be requirements: tf-keras requires `tensorflow`, which
overwrites other builds of TensorFlow, and tf-models-official requires one version of TensorFlow and 80
packages that Orbit never imports. The file ctl_vendored.pth adds the folder to the end of sys.path, so
an installed tf_keras or Orbit is used instead.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

from setuptools import setup
from setuptools.command.build_py import build_py

_PACKAGES = ("tf_keras/", "orbit/")
_LEFT_OUT = ("_test.py", "/examples/")


class BuildWithVendored(build_py):
    """Builds the packages, and downloads the wheels of vendored.txt, whose hashes are checked."""

    def run(self):
        """Builds; an editable installation has no copies."""
        super().run()
        if self.editable_mode:
            return
        root = pathlib.Path(self.build_lib)
        (root / "ctl_vendored.pth").write_text("ctl/_vendored\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--require-hashes"]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*pip, "--dest", folder, "--requirement", "vendored.txt"], check=True)
            for wheel in pathlib.Path(folder).glob("*.whl"):
                with zipfile.ZipFile(wheel) as file:
                    for entry in file.infolist():
                        name = entry.filename
                        chosen = name.startswith(_PACKAGES) or "/licenses/" in name
                        if chosen and not any(part in name for part in _LEFT_OUT):
                            # A folder *.dist-info on sys.path would be a distribution without metadata.
                            entry.filename = name.replace(".dist-info/", "/")
                            file.extract(entry, root / "ctl" / "_vendored")


setup(cmdclass={"build_py": BuildWithVendored})
