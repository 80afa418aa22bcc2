"""Opens the file systems of URLs, such as gs:// and s3://, by fsspec; creates local files."""

import pathlib
import threading
from typing import Any, TextIO

from ctl.errors import UsageError, check_credentials

# The calls that have begun and ended, in all threads. See `calls`.
_CALLS = [0, 0]
_LOCK = threading.Lock()
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


def open_url(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and its path there.

    Raises:
        UsageError: there is no package for the URL's scheme, or the URL has credentials.
    """
    check_credentials(url, url)
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"{url} is no URL: write :// and, in Python, pass it as a string.")
    # Another process may write there at any time, so listings must not be cached.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        import fsspec

        file_system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        fix = "install the fsspec package of this scheme"
        if scheme in _EXTRAS:
            fix = f"pip install 'ctl-tensorflow[{_EXTRAS[scheme]}]'"
        raise UsageError(f"{url} cannot be opened ({one_line(error)}): {fix}.") from None
    return _Counted(file_system), path


def create(path: pathlib.Path) -> TextIO:
    """Opens a new file to write text; removes what a killed process has left at its path.

    Anyone who may write to the folder can put a link there, which must not be followed.
    """
    path.unlink(missing_ok=True)
    return open(path, "x", encoding="utf-8")


def calls() -> tuple[int, int]:
    """Returns how many calls of file systems have begun, and how many are in progress.

    The clients draw from Python's global generator, such as to wait before another try, in a thread
    of their own.
    """
    return _CALLS[0], _CALLS[0] - _CALLS[1]


class _Counted:
    """A file system whose calls are counted."""

    def __init__(self, file_system: Any):
        self._file_system = file_system

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._file_system, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with _LOCK:
                _CALLS[0] += 1
            try:
                return method(*arguments, **options)
            finally:
                with _LOCK:
                    _CALLS[1] += 1

        return call


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
