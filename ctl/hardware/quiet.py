"""Hides messages of TensorFlow that say nothing to users."""

from collections.abc import Iterator
import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import logging
import mmap
import os
import pathlib
import re
import sys
import tempfile
import threading

_LOCK = threading.RLock()
# The functions of the copy of absl in TensorFlow's library, whose namespace names its version.
_SET_LEVEL = rb"_ZN4absl\d+lts_\d+14SetMinLogLevelENS0_18LogSeverityAtLeastE"
_SET_INITIALIZED = rb"_ZN4absl\d+lts_\d+12log_internal14SetInitializedEv"


@functools.cache  # reading the names takes 0.05 s
def hide_absl_messages() -> None:
    """Applies TF_CPP_MIN_LOG_LEVEL to what C++ code logs by absl, such as "Compiled cluster using XLA!".

    TensorFlow itself does not. Call it before TensorFlow is imported, which logs as well. Where the
    functions do not exist, as in another build of TensorFlow, nothing changes.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
    spec = importlib.util.find_spec("tensorflow")
    if level not in ("1", "2", "3") or not (spec and spec.submodule_search_locations):
        return
    path = pathlib.Path(spec.submodule_search_locations[0], "libtensorflow_framework.so.2")
    with (
        contextlib.suppress(OSError, AttributeError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        library = ctypes.CDLL(str(path))
        # If absl counts as initialized, a first error is not preceded by a warning about the others.
        for function, *arguments in ((_SET_LEVEL, int(level)), (_SET_INITIALIZED,)):
            match = re.search(function, content)
            if match:
                library[match[0].decode()](*arguments)


@contextlib.contextmanager
def hold_back_stderr(*expected: type[BaseException]) -> Iterator[None]:
    """Hides what is written to standard error in the block; prints it if the block raises.

    If the process crashes, its Python stacks are printed. With TF_CPP_MIN_LOG_LEVEL=0 in the environment
    nothing is hidden, and neither where no file can be made for it.

    Args:
        *expected: exceptions after which nothing is printed either.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    # One thread at a time: another one would restore the file of this one.
    with contextlib.ExitStack() as stack:
        stack.enter_context(_LOCK)
        try:
            log = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # such as a disk that is full
            yield
            return
        # C++ writes to file descriptor 2, which contextlib.redirect_stderr does not change.
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        reports = faulthandler.is_enabled()  # perhaps to a file of the user's
        if not reports:
            faulthandler.enable(stderr)
        try:
            yield
        except expected:
            raise
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            if not reports:
                faulthandler.disable()
            os.close(stderr)


@contextlib.contextmanager
def hide_warnings(least: int = logging.ERROR) -> Iterator[None]:
    """Hides what TensorFlow's Python code logs below a level in the block, by default its warnings."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)
