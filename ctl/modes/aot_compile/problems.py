"""What keeps a step from running on a TPU, told in the terms of the person who wrote it."""

from collections.abc import Iterator
import dataclasses
import os
import pathlib
import re
import sysconfig
import traceback

import tensorflow as tf

import ctl

_HOST = "A TPU has no such operation"
_CALLBACK = "calls back into Python on the host"
_WHY = {
    "EagerPyFunc": _CALLBACK,
    "PyFunc": _CALLBACK,
    "PyFuncStateless": _CALLBACK,
    "PrintV2": "prints on the host",
    "StringFormat": "makes a string, as tf.print does",
    "AsString": "makes a string",
    "DecodeJpeg": "decodes an image",
    "DecodePng": "decodes an image",
    "DecodeImage": "decodes an image",
    "WriteScalarSummary": "writes a summary on the host",
    "WriteHistogramSummary": "writes a summary on the host",
    "WriteImageSummary": "writes a summary on the host",
    "WriteSummary": "writes a summary on the host",
    "RaggedRange": "makes rows of different lengths",
    "RaggedTensorToTensor": "reads rows of different lengths",
    "RaggedTensorToVariant": "makes rows of different lengths",
}
_SIZED_BY_DATA = ("Where", "Unique", "UniqueV2", "UniqueWithCounts")
_UNSUPPORTED = re.compile(r"No registered '(\w+)' OpKernel .*?\{\{node ([^}]+)\}\}", re.DOTALL)
_DYNAMIC = re.compile(
    r"Input (\d+) to node `([^`]+)` with op (\w+) must be a compile-time constant"
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
_CTL = os.path.dirname(os.path.abspath(ctl.__file__))
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or that may be slow.

    Attributes:
        what: a sentence.
        where: the person's own file and line, where it is known; else "".
        fatal: whether the program does not compile because of it.
    """

    what: str
    where: str = ""
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class Unfit(Exception):
    """The step cannot be a program of a TPU.

    Attributes:
        problems: what is wrong.
    """

    ag_pass_through = True  # AutoGraph would make another exception of it

    def __init__(self, problems: list[Problem]):
        """Says what is wrong."""
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def unknown_sizes(specs: dict[str, tf.TensorSpec]) -> list[Problem]:
    """The tensors of a batch whose shape is not known before it is there."""
    return [
        Problem(
            f"{name} of the batch has the shape {tuple(spec.shape)}: a TPU's program has fixed "
            "shapes, so batch with drop_remainder=True, or pad to one size."
        )
        for name, spec in specs.items()
        if not spec.shape.is_fully_defined()
    ]


def of_tracing(error: Exception) -> Problem:
    """Why TensorFlow could not even trace the step."""
    where = _own_line([(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)])
    text = str(error)
    # AutoGraph replaces the exception, and keeps the lines in its text.
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    where = _own_line([(file, int(line)) for file, line in lines]) or where
    if "singleton tf.Variable" in text or "creating_tfvariables" in text:
        return Problem("makes a variable in every step: make it once, in build_model.", where)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return Problem(f"the step cannot be traced ({_short(last or type(error).__name__)}).", where)


def of_export(error: Exception, graph: tf.Graph) -> list[Problem]:
    """Why XLA could not make a program of the traced step."""
    found = [p for p in in_graph(graph) if p.fatal]
    text = str(error)
    for kind, node in _UNSUPPORTED.findall(text):
        where = _line_of(graph, node)
        if not any(p.where == where for p in found):
            found.append(Problem(_no_such(kind), where))
    for number, node, kind in _DYNAMIC.findall(text):
        found.append(
            Problem(
                f"argument {number} of {kind} ({node}) is a size that the data decide, and a TPU's "
                "program has fixed shapes: give it a number that is known before the step.",
                _line_of(graph, node),
            )
        )
    if not found:
        node = _NODE.search(text)
        where = _line_of(graph, node[1]) if node else ""
        found.append(Problem(f"XLA refuses the step: {_short(text)}", where))
    return found


def in_graph(graph: tf.Graph) -> list[Problem]:
    """What the operations of a step tell before anything compiles it."""
    found: dict[tuple[str, str], Problem] = {}
    for op in _operations(graph):
        problem = _of_operation(op)
        if problem:
            found.setdefault((problem.what, problem.where), problem)
    # The gradient of an operation has no line of its own, and is told with the operation.
    placed = {problem.what for problem in found.values() if problem.where}
    told = [p for p in found.values() if p.where or p.what not in placed]
    doubles = [p for p in told if "float64" in p.what]
    return [p for p in told if p not in doubles] + doubles[:1]  # one float64 makes many


def _of_operation(op: tf.Operation) -> Problem | None:
    where = _own_line([(f.filename, f.lineno) for f in op.traceback])
    if op.type in _WHY:
        return Problem(_no_such(op.type), where)
    if op.type in _SIZED_BY_DATA and where:
        return Problem(
            f"{op.type}'s size depends on the data: XLA pads it to the largest that it can be.",
            where,
            fatal=False,
        )
    # Without a line it is the framework's own, such as a sum in float64 of the evaluation.
    wide = any(o.dtype in (tf.float64, tf.complex128) for o in op.outputs)
    if wide and where and op.type not in ("Placeholder", "Const"):
        return Problem(
            f"{op.type} computes in float64, which a TPU imitates by float32 at a fraction of the "
            "speed: cast to float32.",
            where,
            fatal=False,
        )
    return None


def _no_such(kind: str) -> str:
    why = _WHY.get(kind)
    return (
        f"{_HOST} as {kind}{f', which {why}' if why else ''}: take it out of the step. (Where it runs "
        "at all, TensorFlow does it on the host, a detour in every step that is not checked here.)"
    )


def _operations(graph: tf.Graph, seen: set[str] | None = None) -> Iterator[tf.Operation]:
    """All operations of a graph, also those in its conditionals, loops and calls."""
    seen = set() if seen is None else seen
    for op in graph.get_operations():
        yield op
        for attribute in op.node_def.attr.values():
            names = [attribute.func.name, *(f.name for f in attribute.list.func)]
            for name in filter(None, names):
                if name not in seen and graph._is_function(name):
                    seen.add(name)
                    inner = getattr(graph._get_function(name), "graph", None)
                    if inner is not None:
                        yield from _operations(inner, seen)


def _line_of(graph: tf.Graph, node: str) -> str:
    """The person's line that made a node."""
    for op in _operations(graph):
        if op.name == node or op.name.endswith(f"/{node}") or node.endswith(f"/{op.name}"):
            where = _own_line([(frame.filename, frame.lineno) for frame in op.traceback])
            if where:
                return where
    return ""


def _own_line(frames: list[tuple[str, int | None]]) -> str:
    """The innermost line of the step that is neither of a library nor of ctl."""
    for file, line in reversed(frames):
        path = os.path.abspath(file)
        if path.startswith(_HERE):
            break  # from here outwards it is whoever asked for the export
        outside = (*_LIBRARIES, _CTL + os.sep)
        generated = "__autograph_generated_file" in path
        if not path.startswith(outside) and not generated and pathlib.Path(path).exists():
            return f"{_relative(path)}:{line}"
    return ""


def _relative(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
