"""Names the Python numbers around the user's functions that have changed since the step was traced."""

from collections.abc import Callable, Sequence
import dis
import functools
import inspect
from typing import Any

from ctl.built.observers import Observer
from ctl.rows.row_mask import Rows

_LIBRARIES = ("ctl", "orbit", "tensorflow", "tf_keras")


class OuterNumbers(Observer):
    """Notes the numbers of a trace, which the step reads again before later steps."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Finds the numbers of the functions of a training step."""
        if rows.earlier is None:
            self._numbers = {k: (read, read()) for k, read in _find(self.step.functions()).items()}
            self.step.outer = self

    def values(self) -> list[Any]:
        """Returns the numbers as they are now, and None for what is no number any more."""
        now = [read() for read, _ in self._numbers.values()]
        return [value if isinstance(value, int | float) else None for value in now]

    def name_changed(self) -> None:
        """Prints a line for each number that has changed, once for a step."""
        for name, (read, old) in self._numbers.items():
            if read() != old:
                self.warn_once(
                    f"{name} has changed since the step was traced, which is traced again for each "
                    "change: make it a tf.Variable, or compute it from global_step. For an update in "
                    "some of the steps, pass minimize or the call of ctl.Step when=condition."
                )


def _find(functions: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Returns "NAME in FUNCTION" -> what reads a number in the closure or the module of a function.

    Args:
        functions: values, of which the functions are searched, and those of their modules in them.
    """
    found: dict[str, Callable[[], Any]] = {}
    pending, seen = [*functions], set[int]()
    while pending:
        each = pending.pop()
        each = getattr(each, "__func__", getattr(each, "__wrapped__", each))
        if not inspect.isfunction(each) or id(each) in seen:
            continue
        seen.add(id(each))
        if (each.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        cells = zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
        reads = {name: functools.partial(_content, cell) for name, cell in cells}
        codes = [each.__code__]
        for code in codes:
            codes += filter(inspect.iscode, code.co_consts)
            for load in dis.get_instructions(code):
                if load.opname == "LOAD_GLOBAL":
                    reads[load.argval] = functools.partial(each.__globals__.get, load.argval)
        for name, read in reads.items():
            value = read()
            if isinstance(value, int | float):
                found[f"{name} in {each.__qualname__}"] = read
            elif getattr(value, "__globals__", None) is each.__globals__:
                pending.append(value)
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
