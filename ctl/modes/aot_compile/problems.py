"""Explains, with the user's own file and line, why a step cannot run on a TPU."""

from collections.abc import Iterator
import dataclasses
import re

import tensorflow as tf

from ctl.built import loop_errors
from ctl.configs.error_location import describe, user_frame, user_line
from ctl.graphs import ops

# What an operation does -> the operations.
_REASONS = {
    "calls back into Python on the host": ("EagerPyFunc", "PyFunc", "PyFuncStateless"),
    "prints on the host": ("PrintV2",),
    "makes a string, as tf.print does": ("StringFormat",),
    "makes a string": ("AsString",),
    "decodes an image": ("DecodeJpeg", "DecodePng", "DecodeImage"),
    "writes a summary on the host": (
        "WriteScalarSummary", "WriteHistogramSummary", "WriteImageSummary", "WriteSummary",
    ),
    "makes rows of different lengths": ("RaggedRange", "RaggedTensorToVariant"),
    "reads rows of different lengths": ("RaggedTensorToTensor",),
}  # fmt: skip
_HOST_ONLY = {op_type: reason for reason, types in _REASONS.items() for op_type in types}
_DATA_DEPENDENT_SIZE = ("Where", "Unique", "UniqueV2", "UniqueWithCounts")
_UNSUPPORTED = re.compile(r"No registered '(\w+)' OpKernel .*?\{\{node ([^}]+)\}\}", re.DOTALL)
_NOT_CONSTANT = re.compile(
    r"Input (\d+) to node `([^`]+)` with op (\w+) must be a compile-time constant"
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of a step: an error, or something that may be slow.

    Attributes:
        what: a description in one sentence.
        where: the file and line of the user's code if known, else "".
        fatal: whether it keeps the program from compiling.
    """

    what: str
    where: str = ""
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class NotExportable(Exception):
    """Raised if a step cannot be a TPU program.

    Args:
        problems: the reasons.
    """

    ag_pass_through = True  # otherwise AutoGraph replaces the exception by one of its own

    def __init__(self, problems: list[Problem]):
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def check_shapes(specs: dict[str, tf.TensorSpec]) -> list[Problem]:
    """Returns one problem for each tensor of a batch whose shape is not fully defined."""
    return [
        Problem(
            f"{name} of the batch has the shape {tuple(spec.shape)}, but a TPU program has fixed "
            "shapes: batch with drop_remainder=True, or pad to one size."
        )
        for name, spec in specs.items()
        if not spec.shape.is_fully_defined()
    ]


def explain_tracing_error(error: Exception) -> Problem:
    """Explains why TensorFlow could not trace the step."""
    where, text = user_line(error) or "", str(error)
    if "singleton tf.Variable" in text or "creating_tfvariables" in text:
        return Problem("makes a variable in every step: make it once, in build_model.", where)
    return Problem(f"the step cannot be traced ({describe(error)}).", where)


def explain_export_error(error: Exception, graph: tf.Graph) -> list[Problem]:
    """Explains why XLA could not compile the traced step."""
    problems = [p for p in find_in_graph(graph) if p.fatal]
    text = str(error)
    for op_type, node in _UNSUPPORTED.findall(text):
        where = _line_of_node(graph, node)
        if not any(p.where == where for p in problems):
            problems.append(Problem(_describe_unsupported(op_type), where))
    for number, node, op_type in _NOT_CONSTANT.findall(text):
        problems.append(
            Problem(
                f"argument {number} of {op_type} ({node}) is a size that depends on the data, but a "
                "TPU program has fixed shapes: pass a number that is known before the step.",
                _line_of_node(graph, node),
            )
        )
    if not problems:
        match = _NODE.search(text)
        where = _line_of_node(graph, match[1]) if match else ""
        problems.append(
            Problem(
                loop_errors.explain_xla(error) or f"XLA rejects the step: {_shorten(text)}", where
            )
        )
    return problems


def find_in_graph(graph: tf.Graph) -> list[Problem]:
    """Finds the problems that the operations of a step show before XLA compiles it."""
    unique: dict[tuple[str, str], Problem] = {}
    for op in list_operations(graph):
        problem = _check_operation(op)
        if problem:
            unique.setdefault((problem.what, problem.where), problem)
    # The gradient of an operation has no line of its own; it is reported with the operation.
    with_line = {problem.what for problem in unique.values() if problem.where}
    problems = [p for p in unique.values() if p.where or p.what not in with_line]
    # One float64 tensor makes many others float64, so only the first is reported.
    float64 = [p for p in problems if "float64" in p.what]
    return [p for p in problems if p not in float64] + float64[:1]


def _check_operation(op: tf.Operation) -> Problem | None:
    where = _place(op)
    if op.type in _HOST_ONLY:
        return Problem(_describe_unsupported(op.type), where)
    if op.type in _DATA_DEPENDENT_SIZE and where:
        return Problem(
            f"the size of {op.type} depends on the data: XLA pads it to the largest possible size.",
            where,
            fatal=False,
        )
    # An operation without a user's line belongs to the framework, such as a float64 sum of the
    # evaluation.
    is_64_bit = any(o.dtype in (tf.float64, tf.complex128) for o in op.outputs)
    if is_64_bit and where and op.type not in ("Placeholder", "Const"):
        return Problem(
            f"{op.type} computes in float64, which a TPU emulates by float32 at a fraction of the "
            "speed: cast to float32.",
            where,
            fatal=False,
        )
    return None


def _describe_unsupported(op_type: str) -> str:
    reason = f", which {_HOST_ONLY[op_type]}" if op_type in _HOST_ONLY else ""
    return (
        f"A TPU does not support {op_type}{reason}: remove it from the step. (TensorFlow may run it "
        "on the host, at a cost in every step that is not checked here.)"
    )


def list_operations(graph: tf.Graph, seen: set[str] | None = None) -> Iterator[tf.Operation]:
    """Iterates over all operations of a graph and of its conditionals, loops and calls."""
    seen = set() if seen is None else seen
    for op in graph.get_operations():
        yield op
        for name, inner in ops.called_graphs(op):
            if name not in seen:
                seen.add(name)
                yield from list_operations(inner, seen)


def _line_of_node(graph: tf.Graph, node: str) -> str:
    """Returns the user's line that made a node, or ""."""
    for op in list_operations(graph):
        is_named = op.name == node or op.name.endswith(f"/{node}") or node.endswith(f"/{op.name}")
        if is_named and (where := _place(op)):
            return where
    return ""


def _place(op: tf.Operation) -> str:
    """Returns the user's line that made an operation, or ""."""
    return user_frame([(frame.filename, frame.lineno) for frame in op.traceback or ()]) or ""


def _shorten(text: str) -> str:
    return " ".join(text.split())[:300]
