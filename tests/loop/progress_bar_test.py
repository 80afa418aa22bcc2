"""The bar of a terminal, and the lines above it."""

import io

import rich.console

from ctl.loop.progress_bar import ProgressBar


def make_bar(**arguments):
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=120)
    return ProgressBar(console=console, total=1000, **arguments), screen


def test_bar_follows_each_loop_and_lines_have_their_own_rule():
    bar, screen = make_bar(every=3600.0)
    with bar:
        for step in (100, 200):
            bar.trained(step, {"loss": 0.25}, examples_per_second=9000.0, seconds_left=75.0)
        bar.print_line("Resumed from [bold]a[/bold].")
        bar._bar.refresh()
    text = screen.getvalue()
    assert "step 200/1,000 | loss 0.2500 | 9,000 examples/s | 1 min 15 s left" in text
    assert text.count("train     100/1000 | loss 0.2500 | 9,000 examples/s") == 1
    assert "train     200/1000" not in text
    assert "Resumed from [bold]a[/bold]." in text  # not markup


def test_long_lines_are_not_wrapped():
    bar, screen = make_bar()
    with bar:
        bar.print_line("x" * 300)
    assert "x" * 300 in screen.getvalue()
