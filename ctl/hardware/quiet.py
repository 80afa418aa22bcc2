"""Keeps what TensorFlow's C++ code writes at start-up off the screen. Loads no TensorFlow."""

from collections.abc import Iterator
import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what is written to standard error, in C++ too; shows it if the block fails.

    TF_CPP_MIN_LOG_LEVEL=0 in the environment asks for all of it.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
