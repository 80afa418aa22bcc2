"""The code blocks of docs/writing-a-model.md run: each section is a program, after the example."""

import functools
import re

import pytest

import ctl
from tests.docs.pages import blocks
from tests.support import child

TEXT = (child.ROOT / "docs/writing-a-model.md").read_text()
_PARTS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)[1:]
SECTIONS = {title: blocks(body) for title, body in zip(_PARTS[::2], _PARTS[1::2], strict=True)}
TITLES = [title for title in SECTIONS if title != "The example"]
# The sections that run only on two replicas, among the slow tests.
LONGER = {
    "A language model's loss",
    "A layer or a loss with random numbers",
    "A loss over pairs of the global batch",
    "A metric",
    "Fine-tuning from pretrained weights",
    "Several models and optimizers",
}
assert set(TITLES) > LONGER
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("title", "most"),
    [
        *[(title, 1) for title in TITLES if title not in LONGER],
        *[pytest.param(title, 2, marks=SLOW) for title in TITLES],
    ],
)
def test_section_runs(title, most, monkeypatch):
    """Runs the example and one section, with at most this many replicas instead of 4."""
    names, make = {}, ctl.testing.make_strategy
    monkeypatch.setattr(ctl.testing, "make_strategy", lambda count: make(min(count, most)))
    exec(compile("\n\n".join(SECTIONS["The example"]), "the example", "exec"), names)
    run = functools.cache(names["run"])
    names["run"] = lambda cls, count, *optimizer: run(cls, min(count, most), *optimizer)
    assert SECTIONS[title]
    exec(compile("\n\n".join(SECTIONS[title]), f"docs/writing-a-model.md, {title}", "exec"), names)
