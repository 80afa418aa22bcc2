"""The code blocks of docs/evaluation.md and docs/export.md run."""

import re

import pytest

from tests import child


@pytest.mark.parametrize("page", ["evaluation", "export"])
def test_blocks_run(page, tmp_path):
    text = (child.ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n\n".join(blocks), f"docs/{page}.md", "exec"), {"WORKDIR": tmp_path})
