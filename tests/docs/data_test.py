"""The code blocks of docs/data.md run: together they are one program."""

import re

import pytest

from tests import child


def test_code_blocks_run(tmp_path, monkeypatch):
    pytest.importorskip("google_crc32c")  # the page skips a damaged record
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = (child.ROOT / "docs/data.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    exec(compile("\n\n".join(blocks), "docs/data.md, all blocks", "exec"), {})
