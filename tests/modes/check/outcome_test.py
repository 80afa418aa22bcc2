"""The rows and the summary of the table of outcomes."""

from ctl.modes.check.outcome import FAIL, Outcome, format_row


def test_the_fix_is_on_a_second_line_below_the_observation():
    first, second = format_row("inputs", Outcome(FAIL, "NaN", "fix the data")).splitlines()
    assert second.lstrip().startswith("-> fix the data")
    assert second.index("->") == first.index("NaN")
