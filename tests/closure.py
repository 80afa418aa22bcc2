"""Counts the code that one must read to change a part of ctl: all files that it imports.

    python -m tests.closure                     # the core and the program that trains

A line of code is one with a token other than a comment or a docstring. Imports inside of functions and
the `__init__`s of packages count, imports for type hints (TYPE_CHECKING) do not.
"""

import ast
from collections.abc import Iterable, Iterator
import functools
import io
import pathlib
import tokenize

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


if __name__ == "__main__":
    everything = {path for path in (ROOT / "ctl").rglob("*.py") if "_vendored" not in path.parts}
    chosen = {"core": closure(CORE), "program": closure([*CORE, *PROGRAM]), "ctl": everything}
    for title, paths in chosen.items():
        print(f"{title}: {sum(map(count_lines, paths)):,} lines in {len(paths)} files")
