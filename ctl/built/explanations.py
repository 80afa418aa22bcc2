"""Turns errors that a step raises into a UsageError of one line, by the functions of a table."""

from collections.abc import Callable, Iterator
import contextlib
import pkgutil
from typing import TYPE_CHECKING

from ctl.errors import Failure, UsageError

if TYPE_CHECKING:  # they call `explained`
    from ctl.built.inner_loop import InnerLoop
    from ctl.data.source import Nest

# Functions of (error, loop) -> the line, or "" for other errors. They are imported for an error. The
# loop is None if a `ctl.Step` or an evaluation raised it.
_EXPLANATIONS = (
    "ctl.rows.assertions:explain",
    "ctl.checks.left_tensors:explain",
    "ctl.keras.keras3.detection:explain",
    "ctl.built.loop_errors:explain",
    "ctl.built.out_of_memory:explain",
)
_EXPLAIN_LABEL = "ctl.built.bad_rows:explain_label"


@contextlib.contextmanager
def explained(
    loop: "InnerLoop | None" = None,
    read: "Callable[[], tuple[Nest, list[int] | None]] | None" = None,
) -> Iterator[None]:
    """Raises a UsageError for an error of TensorFlow or Keras that a function of the table explains.

    Args:
        loop: the training loop that runs inside.
        read: returns the global batch of the step that failed, and the indexes of its examples or None.
    """
    try:
        yield
    except (UsageError, Failure):
        raise
    except Exception as error:
        lines = (pkgutil.resolve_name(name)(error, loop) for name in _EXPLANATIONS)
        label = pkgutil.resolve_name(_EXPLAIN_LABEL)(error, read)
        line = label or next(filter(None, lines), "")
        if not line:
            raise
        raise UsageError(line) from error
