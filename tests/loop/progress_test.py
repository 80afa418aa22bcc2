"""The lines of a run, by a clock that the test sets, and the bar of a terminal."""

import errno
import io
import os
import sys

import pytest
import rich.console

from ctl.loop import progress, progress_bar
from tests.support import child


class Screen:
    """A progress with a clock that the test sets, and the lines that it printed."""

    def __init__(self, clock, **options):
        self.lines, self._clock = [], clock
        self.progress = progress.Progress(total=1000, write=self.lines.append, **options)

    def trained(self, step, at=0.0, speed=9000.0, left=75.0, **options):
        """A loop ends at a step and a time; returns the lines that it prints."""
        self._clock.now, before = at, len(self.lines)
        self.progress.trained(
            step, {"loss": 0.25}, examples_per_second=speed, seconds_left=left, **options
        )
        return self.lines[before:]


@pytest.fixture
def screen(clock):
    return Screen(clock)


TRAINED = "train     100/1000 | loss 0.2500"
LAST = "train    1000/1000 | loss 0.2500 | 9,000 examples/s"


@pytest.mark.parametrize(
    ("step", "options", "line"),
    [
        (100, {}, f"{TRAINED} | 9,000 examples/s | 1 min 15 s left"),
        (100, {"speed": None, "left": None}, TRAINED),  # the first loop
        (1000, {"left": 0.0}, LAST),
        (1000, {"left": 3.0}, LAST),
        (100, {"left": None, "last_examples_per_second": 7300.0}, f"{TRAINED} | 9,000 examples/s"),
        (100, {"left": None, "last_examples_per_second": 7100.0},
         f"{TRAINED} | 9,000 examples/s (7,100 in the last loop)"),
        *((100, {"speed": None, "left": None, "input_wait": share}, TRAINED)
          for share in (None, 0.0, 0.05)),
        *((100, {"speed": None, "left": None, "input_wait": share},
           f"{TRAINED} | waited {percent}% for input")
          for share, percent in ((0.051, 5), (0.5, 50), (1.0, 100))),
    ],
)  # fmt: skip
def test_training_line(screen, step, options, line):
    assert screen.trained(step, **options) == [line]


def test_line_has_the_epoch_if_the_data_has_a_length(clock):
    screen = Screen(clock, steps_per_epoch=937.5)
    lines = screen.trained(100, speed=None, left=None)
    assert lines == ["train     100/1000 | epoch 0.11 | loss 0.2500"]


def test_a_line_is_printed_every_few_seconds_and_at_the_last_step(screen):
    times = [(1, 100), (2, 101), (3, 104.9), (4, 105), (5, 109.9), (6, 110), (1000, 111)]
    printed = [bool(screen.trained(step, at)) for step, at in times]
    assert printed == [True, False, False, True, False, True, True]


def test_every_evaluation_has_a_line_and_delays_no_line_of_training(screen):
    screen.trained(1, at=100)
    screen.progress.evaluated(1, {"loss": 0.5, "examples": 10000})
    screen.progress.evaluated(1, {"loss": 0.5, "examples": 10000})
    assert screen.lines[1:] == ["eval        1/1000 | loss 0.5000 | examples 10,000"] * 2
    assert screen.trained(2, at=105)


def test_lines_go_to_standard_output(capsys):
    progress.Progress(total=1).print_line("one")
    assert capsys.readouterr().out == "one\n"


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ({}, ""),
        ({"loss": 0.5, "examples": 10000}, "loss 0.5000 | examples 10,000"),
        ({"loss": {"main": 1.5, "other": 2}}, "loss/main 1.5000 | loss/other 2"),
        ({"loss": 0.0}, "loss 0.0000"),
        ({"loss": -0.5}, "loss -0.5000"),
        ({"loss": 0.001}, "loss 0.0010"),
        ({"loss": 0.000123456}, "loss 1.235e-04"),
        ({"loss": 123456.0}, "loss 1.235e+05"),
        ({"loss": float("nan")}, "loss nan"),
        ({"loss": float("inf")}, "loss inf"),
        ({"best": True, "note": "a", "none": None}, "best True | note a | none None"),
    ],
)
def test_format_numbers(outputs, line):
    assert progress.format_numbers(outputs) == line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.6, "1 s"),
        (42.4, "42 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_format_duration(seconds, words):
    assert progress.format_duration(seconds) == words


def test_a_reader_that_closed_the_pipe_does_not_end_the_run():
    code = (
        "import os, sys\n"
        "from ctl.errors import print_line\n"
        "reader, writer = os.pipe()\n"
        "os.dup2(writer, 1); os.close(writer); os.close(reader)\n"
        "print_line('one'); print_line('two')\n"
        "print('still here', file=sys.stderr)\n"
        "sys.exit(75)\n"
    )
    process = child.run(["-c", code])
    assert (process.returncode, process.stderr) == (75, "still here\n")


def test_a_terminal_that_is_closed_does_not_end_the_run(monkeypatch):
    class Terminal(io.StringIO):
        is_open = True

        def write(self, text):
            if not self.is_open:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(text)

    terminal = Terminal()
    console = rich.console.Console(file=terminal, force_terminal=True)
    monkeypatch.setattr(rich.console, "Console", lambda: console)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the line that fails replaces it
    with progress_bar.ProgressBar(total=1000) as bar:
        bar.print_line("one")
        terminal.is_open = False
        bar.print_line("two")
    assert "one" in terminal.getvalue() and "two" not in terminal.getvalue()


def test_bar_follows_each_loop_and_lines_have_their_own_rule(monkeypatch):
    output = io.StringIO()
    console = rich.console.Console(file=output, force_terminal=True, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda: console)
    bar = progress_bar.ProgressBar(total=1000)
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    with bar:
        for step in (100, 200):
            bar.trained(step, {"loss": 0.25}, examples_per_second=9000.0, seconds_left=75.0)
        bar.print_line("Resumed from [bold]a[/bold].")
        bar.print_line("x" * 300)
        bar._bar.refresh()
    text = output.getvalue()
    assert "step 200/1,000 | loss 0.2500 | 9,000 examples/s | 1 min 15 s left" in text
    assert text.count("train     100/1000 | loss 0.2500 | 9,000 examples/s") == 1
    assert "train     200/1000" not in text
    assert "Resumed from [bold]a[/bold]." in text  # not markup
    assert "x" * 300 in text  # not wrapped
