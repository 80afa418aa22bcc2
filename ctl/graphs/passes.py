"""The two passes of a recomputation, and the values that the second pass takes from the first."""

from collections.abc import Callable, Iterator
import contextlib
import threading
from typing import Any, TypeVar

_T = TypeVar("_T")
_THREAD = threading.local()  # tf.distribute traces each replica in a thread of its own


def keep(compute: Callable[[], _T]) -> _T:
    """Calls a function in the first pass; in a recomputation, returns its result of the first pass.

    Args:
        compute: returns small tensors that no gradient flows through, such as those of a collective.
    """
    first: list[Pass] = []
    for each in reversed(_passes()):
        if each.replays:
            value = each.take()
            break
        first.append(each)
    else:
        value = compute()
    for each in first:
        each.values.append(value)
    return value


class Pass:
    """The first pass of a call, or the recomputation.

    Args:
        values: the values of `keep` in the first pass.
        replays: whether this is the recomputation.
    """

    def __init__(self, values: list[Any], *, replays: bool):
        self.values = values
        self.replays = replays
        self._taken = 0

    def take(self) -> Any:
        """Returns the next value of the first pass."""
        self._taken += 1
        return self.values[self._taken - 1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the innermost pass of the code inside the `with` block."""
        _passes().append(self)
        try:
            yield
        finally:
            _passes().pop()


def _passes() -> list[Pass]:
    if not hasattr(_THREAD, "passes"):
        _THREAD.passes = []
    passes: list[Pass] = _THREAD.passes
    return passes


def in_second_pass() -> bool:
    """Returns whether the code that is being traced is recomputed."""
    return any(each.replays for each in _passes())


def run_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a layer, except in a recomputation."""
    return None if in_second_pass() else original(*args, **kwargs)
