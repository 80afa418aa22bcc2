"""The code blocks of docs/writing-a-model.md run: each section is a program, after the example."""

import re

import pytest

from tests import child

TEXT = (child.ROOT / "docs/writing-a-model.md").read_text()
_PARTS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)[1:]
SECTIONS = {
    title: re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    for title, body in zip(_PARTS[::2], _PARTS[1::2], strict=True)
}


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "The example"])
def test_section_runs(title):
    blocks = [*SECTIONS["The example"], *SECTIONS[title]]
    assert len(blocks) > 1
    exec(compile("\n\n".join(blocks), f"docs/writing-a-model.md, {title}", "exec"), {})
