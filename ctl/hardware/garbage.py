"""Python's garbage collector while modules are imported and graphs are traced."""

from collections.abc import Iterator
import contextlib
import gc


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Pauses the garbage collector in a `with` block, or in a function that it decorates.

    Imports and traces make many objects and drop few, which the collector searches again and again:
    a quarter of the time in which TensorFlow is imported, and 5 % of the time of a trace.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
