"""The code blocks of a page of the documentation."""

import re
import textwrap

from tests.support import child


def blocks(page, language="python"):
    """The code blocks of docs/`page`.md, or of a text that has several lines."""
    text = page if "\n" in page else (child.ROOT / f"docs/{page}.md").read_text()
    matches = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in matches]  # the blocks of a tab are indented


def run(page, **names):
    """Runs all blocks of a page as one program; returns its names."""
    code = "\n\n".join(blocks(page))
    assert code
    exec(compile(code, f"docs/{page}.md, all blocks", "exec"), names)  # not the name of a file
    return names
