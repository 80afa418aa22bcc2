"""The code blocks of docs/testing.md run, and its table has the causes that are reported."""

import pytest

from tests.docs.pages import blocks
from tests.support import child
from tests.testing import mistakes

TEXT = (child.ROOT / "docs/testing.md").read_text()
EXAMPLES = blocks(TEXT)


def test_the_page_has_the_table_of_mistakes_and_a_short_example():
    assert mistakes.make_table() in TEXT
    assert len(mistakes.MISTAKES) >= 15
    body = [line for line in EXAMPLES[0].splitlines() if line and not line.startswith("import")]
    assert len(body) <= 15  # the first example is short


@pytest.mark.slow
def test_all_code_blocks_run(tmp_path):
    code, call = "\n\n".join(EXAMPLES), "(MyTrainer, BATCHES)"
    assert call in code
    # tests/testing compares more splits.
    code = code.replace(call, "(MyTrainer, BATCHES, replicas=(1, 2), accumulation=(1,))")
    (tmp_path / "my_test.py").write_text(code)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--update_golden", "my_test.py"]
    run = child.run(command, cwd=tmp_path)
    assert "6 passed" in run.stdout, run.stdout
