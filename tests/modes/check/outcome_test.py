"""The rows and the summary of the table of outcomes."""

from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome, format_row, format_summary


def test_a_row_names_the_verdict_the_check_and_the_observation():
    assert format_row("inputs", Outcome(PASS, "mean 0")) == "pass     inputs                 mean 0"


def test_the_fix_is_on_a_second_line_below_the_observation():
    first, second = format_row("inputs", Outcome(FAIL, "NaN", "fix the data")).splitlines()
    assert second.lstrip().startswith("-> fix the data")
    assert second.index("->") == first.index("NaN")


def test_the_summary_counts_each_verdict():
    outcomes = [Outcome(verdict, "") for verdict in (PASS, PASS, WARNING, FAIL)]
    assert format_summary(outcomes) == "4 checks: 2 passed, 1 warning, 1 failed."
    assert format_summary(outcomes[:1]) == "1 check: 1 passed, 0 warnings, 0 failed."
