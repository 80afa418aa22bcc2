"""The code blocks of the pages about a trainer run: each section is a program, after the example."""

import functools
import re

import pytest

import ctl
from tests.docs.pages import blocks
from tests.support import child

pytestmark = pytest.mark.slow
PAGES = ("your-model", "your-step", "random", "loss")
SECTIONS = {}
for page in PAGES:
    text = (child.ROOT / f"docs/{page}.md").read_text()
    parts = re.split(r"^#+ (.*)\n(?!#)", text, flags=re.MULTILINE)[1:]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if blocks(f"{body}\n"):
            SECTIONS[f"{page}: {title}"] = blocks(f"{body}\n")
EXAMPLE = "your-model: The example"
TITLES = [title for title in SECTIONS if title != EXAMPLE]
# The sections that run only on two replicas; the long tests run all of them so.
LONGER = {
    "loss: A language model's loss",
    "loss: A loss over pairs of the global batch",
    "loss: Metrics",
    "loss: Other outputs, labels or weights",
    "loss: Your own metric",
    "random: Random numbers",
    "random: One draw for all rows, and partners of rows",
    "your-step: Several models and optimizers",
}
assert set(TITLES) > LONGER


@functools.cache
def example(most):
    """The names of the example, whose `run` trains a class once."""
    names = {}
    exec(compile(SECTIONS[EXAMPLE][0], "the example", "exec"), names)
    run = functools.cache(names["run"])
    names["run"] = lambda cls, count, *optimizer: run(cls, min(count, most), *optimizer)
    return names


@pytest.mark.parametrize(
    ("title", "most"),
    [
        *[(title, 1) for title in TITLES if title not in LONGER],
        *[pytest.param(t, 2, marks=[pytest.mark.long] * (t not in LONGER)) for t in TITLES],
    ],
)
def test_section_runs(title, most, monkeypatch, caplog):
    """Runs the example and one section, with at most this many replicas instead of 4."""
    make = ctl.testing.make_strategy
    monkeypatch.setattr(ctl.testing, "make_strategy", lambda count: make(min(count, most)))
    names = dict(example(most))
    earlier = ["loss: Metrics"] if title == "loss: Other outputs, labels or weights" else []
    code = [block for other in [*earlier, title] for block in SECTIONS[other]]
    exec(compile("\n\n".join(code), f"docs, {title}", "exec"), names)
    assert "which the step does not train" not in caplog.text
