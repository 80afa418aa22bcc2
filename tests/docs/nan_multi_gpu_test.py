"""The code blocks of docs/nan-multi-gpu.md run, in their order."""

import re

from tests import child

TEXT = (child.ROOT / "docs/nan-multi-gpu.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_code_blocks_run():
    assert len(BLOCKS) == 3
    exec(compile("\n\n".join(BLOCKS), "docs/nan-multi-gpu.md", "exec"), {})
