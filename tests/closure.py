"""Counts the code that one must read to change a part of ctl: all files that it imports.

    python -m tests.closure

A line of code is one with a token other than a comment or a docstring. Imports inside of functions and
the `__init__`s of packages count, imports for type hints (TYPE_CHECKING) do not. What a process loads is
counted, too: rows of tables are imported by their names. The last lines are about how ctl reads: types
that are `Any`, names of classes that exist twice, and functions with more than 20 branches.
"""

import ast
import collections
from collections.abc import Iterable, Iterator
import functools
import io
import pathlib
import subprocess
import sys
import tokenize
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORE = ("ctl.trainer", "ctl.evaluator", "ctl.step")
PROGRAM = ("ctl.main", "ctl.modes.train")
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


@functools.cache
def count_lines(path: pathlib.Path) -> int:
    """Counts the lines of code of a file."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def find_file(module: str) -> pathlib.Path | None:
    """Returns the file of a module or package of ctl; None for other names."""
    path = ROOT / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def imports(path: pathlib.Path) -> Iterator[str]:
    """Yields the names of ctl that a file imports, and the packages that contain them."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            nodes += ast.iter_child_nodes(node)
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ctl":
                yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))


def closure(modules: Iterable[str]) -> set[pathlib.Path]:
    """Returns the files of modules, and all files of ctl that they import, directly or not."""
    pending, files = list(modules), set()
    while pending:
        path = find_file(pending.pop())
        if path and path not in files:
            files.add(path)
            pending += imports(path)
    return files


_LOADED = """
import sys
import ctl.evaluator, ctl.step, ctl.trainer
if sys.argv[1:]:
    import numpy as np, tensorflow as tf, tf_keras, ctl
    class Trainer(ctl.StandardTrainer):
        def build_model(self):
            return tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=[2])])
        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": np.ones([8, 2], "f"), "label": np.ones([8], "f")})
        def per_example_loss(self, batch, outputs):
            return (batch["label"] - outputs[:, 0]) ** 2
    sgd = lambda: tf_keras.optimizers.SGD(0.1)
    Trainer(global_batch_size=4, optimizer=sgd).train(tf.constant(2))
print("\\n".join(m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "ctl"))
"""


def loaded(*, trains: bool) -> set[pathlib.Path]:
    """Returns the files of ctl that a process imports with the core, and by two steps if it trains."""
    command = [sys.executable, "-c", _LOADED, *(["trains"] if trains else [])]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {path for path in map(pathlib.Path, process.stdout.split("\n")) if path.is_file()}


def files_of(package: str) -> set[pathlib.Path]:
    """Returns the files of a package, without those that are copied from others."""
    return {path for path in (ROOT / package).rglob("*.py") if "_vendored" not in path.parts}


def nodes(paths: Iterable[pathlib.Path], kind: type[ast.AST]) -> Iterator[Any]:
    """Yields the nodes of a kind in the syntax trees of files."""
    for path in paths:
        yield from (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, kind))


def branched(package: str) -> int:
    """Returns how many functions have more than 20 branches, which radon calls D."""
    command = ["-m", "ruff", "check", package, "--select", "C901", "--output-format", "concise"]
    limit = ["--config", "lint.mccabe.max-complexity=20"]
    process = subprocess.run(
        [sys.executable, *command, *limit], cwd=ROOT, capture_output=True, text=True
    )
    return process.stdout.count("C901")


if __name__ == "__main__":
    everything = files_of("ctl")
    chosen = {
        "core": closure(CORE),
        "program": closure([*CORE, *PROGRAM]),
        "ctl": everything,
        "tests": files_of("tests"),
        "benchmarks": files_of("benchmarks"),
        "loaded by importing the core": loaded(trains=False),
        "loaded by two steps": loaded(trains=True),
    }
    for title, paths in chosen.items():
        print(f"{title}: {sum(map(count_lines, paths)):,} lines in {len(paths)} files")
    templates = {path for path in everything if "project_template" in path.parts}
    classes = collections.Counter(x.name for x in nodes(everything - templates, ast.ClassDef))
    names = [x.id for x in nodes(everything, ast.Name)]
    total = sum(map(count_lines, everything))
    print(f"`Any` per 100 lines: {100 * names.count('Any') / total:.2f}")
    print(f"names of classes that exist twice: {sum(n > 1 for n in classes.values())}")
    print(f"functions with more than 20 branches: {branched('ctl')}")
