"""The version of the installed ctl, and its folder."""

import importlib.metadata
import pathlib

FOLDER = pathlib.Path(__file__).absolute().parent
DISTRIBUTION = "ctl-tensorflow"  # `ctl` is another project on the package index


def find_version() -> str:
    """Returns the version in pyproject.toml, which the installed package records."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+unknown"
