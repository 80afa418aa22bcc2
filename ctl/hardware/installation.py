"""Checks the version of TensorFlow, and sets environment variables that it reads at its import."""

from collections.abc import MutableMapping
import importlib.util
import os

from ctl.errors import UsageError
from ctl.hardware import engines, load, quiet
from ctl.version import installed_versions

DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")
FIRST, END = (2, 18), (2, 23)


def check() -> None:
    """Checks that a supported TensorFlow is installed, with tf_keras and Orbit.

    Raises:
        UsageError: it is missing or too old or new; the line names the command that installs it.
    """
    install = f'pip install "tensorflow>={_text(FIRST)},<{_text(END)}"'
    for name, version in installed_versions(*DISTRIBUTIONS).items():
        number = tuple(int(part) for part in version.split(".")[:2])
        if not FIRST <= number < END:
            raise UsageError(
                f"ctl was tested with TensorFlow {_text(FIRST)} to {END[0]}.{END[1] - 1}, but {name} "
                f"{version} is installed: {install}"
            )
        break
    else:  # a build of another name, such as a vendor's, is accepted if it can be found
        if importlib.util.find_spec("tensorflow") is None:
            raise UsageError(f"TensorFlow is not installed: {install}")
    for package, command in (
        ("tf_keras", "pip install --no-deps tf-keras==2.20.1"),
        ("orbit", "pip install --no-deps tf-models-official==2.19.1"),
    ):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"The package {package} is not installed: {command}")


def prepare_import() -> None:
    """Hides the messages that TensorFlow logs; call it before TensorFlow is imported."""
    set_variables(os.environ)
    quiet.hide_absl_messages()


def set_variables(environment: MutableMapping[str, str]) -> None:
    """Sets variables that TensorFlow reads when it is imported, unless they are set.

    They are the level of the messages of its C++ code, and whether it looks for a TPU of this machine.
    One process prints errors only. One of several processes on CPUs does not print errors either: a
    lost worker would cause several, around the line that ctl prints. All of them are raised in Python,
    too, except errors of the libraries of GPUs.
    """
    try:
        several = engines.from_environment(environment) is not None
    except UsageError:  # reported once the config has been checked
        several = False
    level = "3" if several and not load("gpu:list_gpus")() else "2"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    load("tpu:skip_metadata_server")(environment)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
