"""The code blocks of docs/prove-your-loop.md run, and report what the page shows."""

import re

import pytest

from benchmarks.comparisons import tutorials
from ctl import testing
from tests.docs.pages import blocks
from tests.support import child

TEXT = (child.ROOT / "docs/prove-your-loop.md").read_text()
TABLE = [line for line in TEXT.splitlines() if re.search(r"\| (equivalent|differs) \|", line)]


FIRST = blocks(TEXT.partition("## What is compared")[0])
FINDINGS = dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL))


def run(*replaced, options=""):
    names = {}
    test = FIRST[0].replace("(x, label))", f"(x, label){options})")
    code = "\n\n".join([FIRST[1], *replaced, test])
    exec(compile(code, "docs/prove-your-loop.md", "exec"), names)
    names["test_my_loop"]()


@pytest.mark.slow
def test_the_first_example_has_five_lines_and_passes():
    assert len([line for line in FIRST[0].splitlines() if line]) <= 5
    run()


TWO = ", replicas=(1, 2), batch_sizes=(8, 5)"  # the messages are about two replicas


@pytest.mark.slow
@pytest.mark.parametrize("finding", FINDINGS)
def test_finding_is_reported_and_its_fix_passes(finding):
    mistake, *fix = blocks(FINDINGS[finding])
    text = re.sub(r"```.*?```", "", FINDINGS[finding], flags=re.S)
    shown = re.findall(r"^    (?!\w*def )(.*)", text, re.M)
    parts = [" ".join(part.split()) for part in " ".join(shown).split("...")]
    with pytest.raises(AssertionError) as error:
        run(mistake, options=TWO)
    assert all(part.strip() in " ".join(str(error.value).split()) for part in parts)
    if fix:
        run(*fix, options=TWO)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["custom training tutorial, Keras 2", pytest.param("`fit`, Keras 2", marks=pytest.mark.long)],
)
def test_rows_of_the_table_are_those_that_the_command_prints(name):
    testing.split_cpu(4)
    assert len(TABLE) == len(tutorials.programs())
    (row,) = tutorials.rows([name])
    assert row in TABLE
