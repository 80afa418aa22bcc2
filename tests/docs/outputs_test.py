"""The outputs on the pages of the learning path are those of runs; docs/outputs.py compares them."""

from docs import outputs

SHOWN = ["train 100/200 | loss 0.8544 | 84,815 examples/s", "...", "8 passed"]
PRINTED = [
    "train 100/200 | loss 0.8546 | 12 examples/s | waited 7% for input",
    "a",
    "b",
    "8 passed",
]


def test_an_output_may_differ_in_speeds_last_digits_and_left_out_lines():
    assert outputs.matches(SHOWN, PRINTED)
    for i, line in enumerate(["train 101/200 | loss 0.8546 | 12 examples/s", "c", "d", "9 passed"]):
        if i in (0, 3):
            assert not outputs.matches(SHOWN, [*PRINTED[:i], line, *PRINTED[i + 1 :]])
    assert not outputs.matches(SHOWN, [PRINTED[0].replace("0.8546", "0.9546"), *PRINTED[1:]])
    assert not outputs.matches(SHOWN, PRINTED[:-1])
    assert outputs.shorten(SHOWN, PRINTED) == [PRINTED[0], "...", "8 passed"]


def test_every_block_of_the_learning_path_runs_or_says_why_not():
    for page in outputs.PATH:
        blocks = outputs.read_blocks(page)
        paired = [block for pair in outputs.pair(blocks) for block in pair]
        assert [f"{page}:{b.line}" for b in blocks if not any(b is p for p in paired)] == []
        assert [f"{page}:{b.line}" for b in blocks if b.language == "text" and not b.code] == []
