"""Finds loops of many short iterations in a compiled step, which XLA makes of some operations."""

from collections.abc import Iterator
import re
from typing import Any, NamedTuple

from ctl.configs.error_location import user_frame
from ctl.graphs import ops

_WHILE = re.compile(r" while\(.*?known_trip_count\":\{\"n\":\"(\d+)\"")
_FEW = 64  # iterations of a loop that is not reported
_NAME = re.compile(r'op_name="([^"]*)"')


class SerialLoop(NamedTuple):
    """A loop inside of a step.

    Attributes:
        iterations: how often it runs in a step.
        name: the TensorFlow operation that it comes from.
        line: the user's line that added the operation; "" if the code of a library did.
    """

    iterations: int
    name: str
    line: str


def find(program: Any, arguments: Any) -> Iterator[SerialLoop]:
    """Yields the loops of a compiled inner loop with many iterations.

    On a GPU each iteration starts kernels that compute next to nothing.

    Args:
        program: a `tf.function` that XLA compiles: the inner loop.
        arguments: its arguments.
    """
    text = program.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")
    graph = program.get_concrete_function(*arguments).graph
    operations = {op.name: op for op in ops.with_called(graph.get_operations())}
    entry = text[text.index("\nENTRY ") :]  # the loop over the steps
    for line in text[: text.index("\nENTRY ")].splitlines():
        loop, name = _WHILE.search(line), _NAME.search(line)
        if loop and int(loop[1]) > _FEW and line not in entry:
            # Its name begins with that of the loop over the steps.
            operation = name[1].partition("/")[2] if name else ""
            op = operations.get(operation)
            frames = [(frame.filename, frame.lineno) for frame in op.traceback] if op else []
            yield SerialLoop(int(loop[1]), operation, user_frame(frames) or "")
