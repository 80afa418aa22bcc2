"""The code blocks of docs/writing-a-model.md run: each section is a program, after the example."""

import functools
import re

import pytest

import ctl
from tests import child

TEXT = (child.ROOT / "docs/writing-a-model.md").read_text()
_PARTS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)[1:]
SECTIONS = {
    title: re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    for title, body in zip(_PARTS[::2], _PARTS[1::2], strict=True)
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "most", [1, pytest.param(2, marks=SLOW), pytest.param(4, marks=[SLOW, pytest.mark.long])]
)
@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "The example"])
def test_section_runs(title, most, monkeypatch):
    """Runs the example and one section, with at most this many replicas instead of 4."""
    names, make = {}, ctl.testing.make_strategy
    monkeypatch.setattr(ctl.testing, "make_strategy", lambda count: make(min(count, most)))
    exec(compile("\n\n".join(SECTIONS["The example"]), "the example", "exec"), names)
    run = functools.cache(names["run"])
    names["run"] = lambda cls, count, *optimizer: run(cls, min(count, most), *optimizer)
    assert SECTIONS[title]
    exec(compile("\n\n".join(SECTIONS[title]), f"docs/writing-a-model.md, {title}", "exec"), names)
