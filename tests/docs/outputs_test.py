"""The outputs on the pages are those of runs; docs/outputs.py compares them."""

import pytest

from docs import outputs
from tests.support import child

SHOWN = ["train 100/200 | loss 0.8544 | 84,815 examples/s", "...", "8 passed"]
LINE = "train 100/200 | loss 0.8546 | 12 examples/s | waited 7% for input"
PRINTED = [LINE, "a", "b", "8 passed"]


def test_an_output_may_differ_in_speeds_last_digits_and_left_out_lines():
    assert outputs.matches(SHOWN, PRINTED)
    for old, new in (("100/", "101/"), ("0.8546", "0.9546"), ("8 passed", "9 passed")):
        assert not outputs.matches(SHOWN, [line.replace(old, new) for line in PRINTED])
    assert not outputs.matches(SHOWN, PRINTED[:-1])
    assert outputs.shorten(SHOWN, PRINTED) == [PRINTED[0], "...", "8 passed"]


def test_a_long_line_may_be_wrapped_and_cut():
    shown = "Step 6 is not finite: ... the rows"
    printed = shown.replace("...", "the loss of")
    assert outputs.is_same(shown, printed)
    assert not outputs.is_same(shown.replace("6", "7"), printed)
    assert not outputs.is_same(shown.replace("rows", "row"), printed)


def test_every_output_is_compared_or_names_its_test_or_says_why_not():
    for page in outputs.all_pages():
        blocks = outputs.read_blocks(page)
        paired = [block for pair in outputs.pair(blocks) for block in pair]
        shown = [b for b in blocks if page in outputs.PATH or b.language == "text"]
        assert [f"{page}:{b.line}" for b in shown if not any(b is p for p in paired)] == []
        assert [f"{page}:{b.line}" for b in blocks if b.language == "text" and not b.code] == []
        tests = [b.comments["tested"].split(",")[0] for b in blocks if "tested" in b.comments]
        assert [test for test in tests if not (child.ROOT / test).exists()] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_pages_show_what_runs_print():
    done = child.run(["-m", "docs.outputs"], cwd=child.ROOT, timeout=7200)
    assert done.returncode == 0, done.stdout
