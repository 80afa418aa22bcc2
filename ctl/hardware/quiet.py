"""Hides messages of TensorFlow that say nothing to users."""

from collections.abc import Iterator
import contextlib
import logging
import os
import sys
import tempfile


@contextlib.contextmanager
def hold_back_stderr() -> Iterator[None]:
    """Hides what is written to standard error in the block; prints it if the block raises.

    With TF_CPP_MIN_LOG_LEVEL=0 in the environment nothing is hidden.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    sys.stderr.flush()
    # C++ writes to file descriptor 2, which contextlib.redirect_stderr does not change.
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def hide_warnings() -> Iterator[None]:
    """Hides the warnings of TensorFlow's Python code in the block; the program hides them everywhere."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
