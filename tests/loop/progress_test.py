"""The lines of a run, and the bar of a terminal."""

import errno
import io
import os
import sys
import types

import pytest
import rich.console

from ctl.loop import progress, progress_bar
from tests.support import child


def measured(speed=None, left=None, *, last=None, input_wait=None):
    """What a `Throughput` has measured."""
    speeds = dict(examples_per_second=speed, last_examples_per_second=last)
    waits = dict(input_wait=input_wait, seconds_for=lambda steps: left)
    return types.SimpleNamespace(**speeds, **waits)


def trained(step, *, speed=9000.0, left=75.0, steps_per_epoch=None, **options):
    """The lines that the first loop of a run prints."""
    lines = []
    shown = progress.Progress(total=1000, steps_per_epoch=steps_per_epoch, write=lines.append)
    shown.trained(step, {"loss": 0.25}, measured(speed, left, **options), last_step=1000)
    return lines


TRAINED = "train     100/1000 | loss 0.2500"
LAST = "train    1000/1000 | loss 0.2500 | 9,000 examples/s"


@pytest.mark.parametrize(
    ("step", "options", "line"),
    [
        (100, {}, f"{TRAINED} | 9,000 examples/s | 1 min 15 s left"),
        (100, {"speed": None, "left": None}, TRAINED),  # the first loop
        (1000, {"left": 3.0}, LAST),
        (100, {"left": None, "last": 7300.0}, f"{TRAINED} | 9,000 examples/s"),
        (100, {"left": None, "last": 7100.0},
         f"{TRAINED} | 9,000 examples/s (7,100 in the last loop)"),
        *((100, {"speed": None, "left": None, "input_wait": share}, TRAINED)
          for share in (None, 0.05)),
        *((100, {"speed": None, "left": None, "input_wait": share},
           f"{TRAINED} | waited {percent}% for input")
          for share, percent in ((0.051, 5), (1.0, 100))),
    ],
)  # fmt: skip
def test_training_line(step, options, line):
    assert trained(step, **options) == [line]


def test_line_has_the_epoch_if_the_data_has_a_length():
    lines = trained(100, speed=None, left=None, steps_per_epoch=937.5)
    assert lines == ["train     100/1000 | epoch 0.11 | loss 0.2500"]


@pytest.mark.parametrize(
    ("options", "steps", "printed"),
    [
        # 18 epochs of 32 steps have a line each, and one for a first loop that is no epoch.
        ({"total": 576, "steps_per_epoch": 32}, [*range(10, 576, 10), 576], 19),
        ({"total": 576, "steps_per_epoch": 32}, range(32, 577, 32), 18),
        ({"total": 10_000, "steps_per_epoch": 1}, range(1, 10_001), 101),
        ({"total": 10_000, "steps_per_epoch": 5000}, range(100, 10_001, 100), 11),
        ({"total": 10_000}, range(100, 10_001, 100), 11),
        ({"total": 10_000, "evaluates": True}, range(100, 10_001, 100), 10),
        # 125 steps are 12 epochs of 1000 / 96 steps, which is 125.00000000000001 as a float.
        ({"total": 125, "steps_per_epoch": 1000 / 96}, range(5, 126, 5), 13),
    ],
)
def test_lines_of_training_depend_on_the_steps_alone(options, steps, printed):
    lines = []
    shown = progress.Progress(write=lines.append, **options)
    for step in steps:
        shown.trained(step, {}, measured(), last_step=options["total"])
    assert len(lines) == printed
    assert lines[-1].startswith(f"train {steps[-1]:>7}/{options['total']}")


def test_each_evaluation_has_a_line_after_the_last_loop_before_it():
    lines = []
    shown = progress.Progress(total=9, evaluates=True, write=lines.append)
    for step in (3, 6):
        shown.trained(step - 1, {}, measured(), last_step=9)
        shown.trained(step, {}, measured(), last_step=9)
        shown.evaluated(step, {"examples": 10_000})
    shown.evaluated(6, {"examples": 10_000})
    shown.evaluated(12, {"loss": 0.5})  # a checkpoint of a longer run
    starts = " ".join(" ".join(line.partition(" |")[0].split()) for line in lines)
    assert starts == "train 3/9 eval 3/9 train 6/9 eval 6/9 eval 6/9 eval 12"
    assert lines[1] == "eval        3/9 | examples 10,000"


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ({}, ""),
        ({"loss": 0.5, "examples": 10000}, "loss 0.5000 | examples 10,000"),
        ({"loss": {"main": 1.5, "other": 2}}, "loss/main 1.5000 | loss/other 2"),
        ({"loss": 0.0}, "loss 0.0000"),
        ({"loss": -0.001}, "loss -0.0010"),
        ({"loss": 0.000123456}, "loss 1.235e-04"),
        ({"loss": 123456.0}, "loss 1.235e+05"),
        ({"loss": float("nan")}, "loss nan"),
        ({"best": True, "note": "a", "none": None}, "best True | note a | none None"),
    ],
)
def test_format_numbers(outputs, line):
    assert progress.format_numbers(outputs) == line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.6, "1 s"),
        (59.6, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
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
    with bar:
        for step in (100, 200):
            bar.trained(step, {"loss": 0.25}, measured(9000.0, 75.0), last_step=1000)
        bar.print_line("Resumed from [bold]a[/bold].")
        bar.print_line("x" * 300)
        bar._bar.refresh()
    text = output.getvalue()
    assert "step 200/1,000 | loss 0.2500 | 9,000 examples/s | 1 min 15 s left" in text
    assert text.count("train     100/1000 | loss 0.2500 | 9,000 examples/s") == 1
    assert "train     200/1000" not in text
    assert "Resumed from [bold]a[/bold]." in text  # not markup
    assert "x" * 300 in text  # not wrapped
