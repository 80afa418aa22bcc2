"""The versions of TensorFlow that ctl supports, checked without importing it."""

from collections.abc import Callable
import importlib.metadata
import importlib.util

from ctl.errors import UsageError

DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")
FIRST, END = (2, 18), (2, 23)


def check(find_version: Callable[[str], str] = importlib.metadata.version) -> None:
    """Checks that a supported TensorFlow is installed, with tf_keras and Orbit.

    Raises:
        UsageError: it is missing or too old or new; the line names the command that installs it.
    """
    install = f'pip install "tensorflow>={_text(FIRST)},<{_text(END)}"'
    for name in DISTRIBUTIONS:
        try:
            version = find_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
