"""The code blocks of docs/testing.md run, and its table has the causes that are reported."""

import re
import subprocess
import sys

import pytest

from tests import child
from tests.testing import mistakes

TEXT = (child.ROOT / "docs/testing.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_page_ends_with_the_table_of_mistakes():
    assert TEXT.endswith(mistakes.make_table())
    assert len(mistakes.MISTAKES) >= 15


@pytest.mark.slow
def test_all_code_blocks_run(tmp_path):
    (tmp_path / "my_test.py").write_text("\n\n".join(EXAMPLES))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--update_golden",
            "my_test.py",
        ],
        cwd=tmp_path,
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert "6 passed" in run.stdout, run.stdout


def test_first_example_is_short():
    body = [line for line in EXAMPLES[0].split("\n\n") if not line.startswith("import")]
    assert len([line for line in "\n".join(body).splitlines() if line]) <= 15
