"""The versions of the installed ctl and of the packages that it computes with, and its folder."""

import contextlib
import importlib.metadata
import pathlib

FOLDER = pathlib.Path(__file__).absolute().parent
DISTRIBUTION = "ctl-tensorflow"  # `ctl` is another project on the package index


def installed_versions(*packages: str) -> dict[str, str]:
    """Returns name -> version of the packages that are installed, in the order of the names."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def find_version() -> str:
    """Returns the version in pyproject.toml, which the installed package records."""
    # A checkout on PYTHONPATH is not installed.
    return installed_versions(DISTRIBUTION).get(DISTRIBUTION, "0+unknown")


def versions() -> dict[str, str]:
    """Returns the versions of ctl and of the packages that determine its results."""
    import tensorflow as tf
    import tf_keras

    # TensorFlow's package has another name on each kind of hardware: tensorflow_cpu, tensorflow_tpu.
    # The wheel of ctl has a copy of tf_keras, which is no package of its own.
    found = {
        "ctl": find_version(), "tensorflow": tf.__version__, "tf_keras": tf_keras.__version__
    }  # fmt: skip
    return found | installed_versions("tf-models-official", "numpy")
