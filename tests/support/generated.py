"""Generated input: strategies for odd values, and the checks of how the program ends on them.

Whatever ctl is given, it either uses it for exactly what it says, or rejects it in one line and
writes nothing. By default the cases are the same in each run; this tries new ones:

    python -m pytest --hypothesis-profile=long tests/end_to_end/generated_input_test.py
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock
import warnings

import hypothesis
from hypothesis import strategies as st

from ctl import main
from ctl.errors import UsageError
from ctl.hardware import quiet
from ctl.loop.workdir import Workdir
from tests.support import experiments

FILES = {
    "exp.py": experiments.CONFIG,
    "tiny.py": "import ctl\n\nclass Tiny(ctl.StandardTrainer):\n    pass\n",
}
ODD_JSON = (
    *(None, True, False, 0, -1, 1, 2, 10**30, 1.0, 0.5, 1e300, float("nan"), float("inf")),
    *("", " ", "0", "1", "-1", "--1", "1.0", "²", "٣", "½", "+1", "1_0", "worker", "é🙂", "\ud800"),
    *("a\0b", "a\nb", "x" * 5000, "9" * 5000, [], {}, [[]], [{}], {"0": "a:1"}, ["a:1"], ["a:0"]),
    *(["a:99999"], ["a:٣"], ["a"], [":1"], ["a:1", "a:1"], ["[::1]:1"], ["a b:1"], ["é:1"], [1]),
    *(["http://a:1"], [None], {"a": {"b": []}}, ["a:1", "A:1", "a:01"]),
)
ODD_JSON_TEXTS = (
    *(b"", b" ", b"null", b"[", b"[" * 99_999, b'{"a":' * 99_999, b"\0\0", b"\xff\xfe", b"{}{}"),
    *(b"1" * 5000, b"\xef\xbb\xbf{}", b'"\\ud800"'),
)
odd_keys = st.sampled_from(["", "0", "é", "master", "evaluator", "worker", "ps", "chief", "x.y"])


def explore(cases, accepts, *, count=1.0):
    """Runs a check on many cases, and fails unless each outcome occurs often enough.

    Args:
        cases: the strategy that generates them.
        accepts: the check of one case: returns whether ctl accepts it, raises if ctl is wrong.
        count: the number of cases, relative to max_examples of the hypothesis profile.
    """
    outcomes = collections.Counter()
    number = int(hypothesis.settings.default.max_examples * count)

    @hypothesis.settings(max_examples=number)
    @hypothesis.given(cases)
    def check(case):
        outcomes[accepts(case)] += 1

    check()
    assert outcomes[False] > number / 5, f"too few cases are wrong: {outcomes}"
    assert outcomes[True] > number / 60, f"too few cases are right: {outcomes}"


@st.composite
def damaged(draw, raw):
    """Bytes of which some pieces were replaced, removed, inserted, doubled or cut off."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 5]))):
        start = draw(st.integers(0, len(raw)))
        end = start + draw(st.sampled_from([0, 1, 1, 1, 2, 8, 50, len(raw)]))
        piece = draw(st.one_of(st.binary(max_size=1), st.binary(max_size=50), st.just(raw[start:])))
        raw = raw[:start] + piece + raw[end:]
    return raw


@st.composite
def changed_json(draw, tree):
    """A JSON value in which one node was replaced, removed, renamed, doubled or reordered."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 6)) == 1:
        return draw(st.sampled_from(ODD_JSON))
    items = dict(enumerate(tree)) if isinstance(tree, list) else dict(tree)
    key = draw(st.sampled_from(list(items)))
    change = draw(st.sampled_from(["node"] * 7 + ["remove", "rename", "double", "type"]))
    if change == "node":
        items[key] = draw(changed_json(items[key]))
    if change in ("rename", "double"):
        items[draw(odd_keys)] = items[key]
    if change in ("rename", "remove"):
        del items[key]
    if isinstance(tree, list) != (change == "type"):
        return draw(st.permutations(list(items.values())))
    return {str(name): node for name, node in items.items()}


def json_texts(tree):
    """The bytes of a JSON value that was changed once or twice, was damaged, or is another one."""
    text, changed = json.dumps(tree).encode(), changed_json(tree)
    trees = st.one_of(changed, changed, changed.flatmap(changed_json))
    texts = trees.map(lambda value: json.dumps(value).encode())
    return st.one_of(texts, texts, texts, damaged(text), st.sampled_from(ODD_JSON_TEXTS))


@contextlib.contextmanager
def folder(files):
    """Makes a temporary folder with these files the current one."""
    start = pathlib.Path.cwd()
    with tempfile.TemporaryDirectory() as path:
        experiments.write(path, files)
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(start)


@contextlib.contextmanager
def unchanged():
    """Fails if anything in the current folder has changed at the end."""
    before = _content()
    yield
    assert _content() == before, "rejected or only read, and yet files have changed"


def _content():
    return {p: p.read_bytes() if p.is_file() else None for p in pathlib.Path().rglob("*")}


@dataclasses.dataclass
class Outcome:
    """How the program ended: its exit code, its stderr, and the config if it accepted one."""

    code: int
    error: str
    config: Any = None


class _ImportsTensorFlow(BaseException):
    """The program accepts its input: it begins to import TensorFlow."""


class _Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow":
            raise _ImportsTensorFlow


def run_without_tensorflow(arguments, **environment):
    """Runs the program in this process, up to the point where it would import TensorFlow."""
    quiet.hide_absl_messages()  # once per process; it looks for TensorFlow without importing it
    configs, check_config = [], Workdir.check_config

    def record(self, config, **options):
        check_config(self, config, **options)
        configs.append(config)

    # Without its entry in sys.modules, `import tensorflow` is an import again.
    modules = {name: module for name, module in sys.modules.items() if name == "tensorflow"}
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.update, modules)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.object(Workdir, "check_config", record))
        stack.enter_context(mock.patch.object(sys, "meta_path", [_Blocker(), *sys.meta_path]))
        for name in modules:
            del sys.modules[name]
        outcome = run(arguments)
    outcome.config = configs[-1] if configs and outcome.code == 0 else None
    return outcome


def run(arguments):
    """Runs the program in this process, as `python -m ctl.main` does in its own."""
    stdout, stderr = (  # encoded as on a terminal
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    with (
        mock.patch.multiple(sys, path=["", *sys.path], dont_write_bytecode=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Python's own, about a damaged source file
        try:
            code = main.run(["ctl", *arguments])
        except _ImportsTensorFlow:
            code = 0
    return Outcome(code, stderr.buffer.getvalue().decode())


def is_accepted(outcome, *names):
    """Whether the program accepted its input; fails if it did neither that nor reject it properly.

    Args:
        outcome: how the program ended.
        names: the line of a rejection must contain one of them, if there are any.
    """
    if outcome.code == 0:
        assert not outcome.error, "exit code 0, and yet a line on stderr"
        return True
    assert outcome.code == 2, outcome
    assert outcome.error.startswith("ctl: ") and len(outcome.error) < 5_000
    check_line(outcome.error, names)
    return False


def check_line(line, names):
    """Fails unless a message is one line that contains one of the names."""
    assert line.endswith("\n") and len(line.splitlines()) == 1 and "Traceback" not in line
    assert not names or any(name in line for name in names), f"none of {names} is in {line}"


def rejects(function, *names):
    """Whether a function raises UsageError, and what it returns otherwise."""
    try:
        return False, function()
    except UsageError as error:
        check_line(" ".join(str(error).split()) + "\n", names)
        return True, None
