"""The lines of a run, by a clock that the test sets."""

import pytest

from ctl.loop import progress
from tests import child


class Screen:
    """A progress with a clock that the test sets, and the lines that it printed."""

    def __init__(self, total=1000, every=5.0):
        self.lines, self.now = [], 100.0
        self.progress = progress.Progress(
            total=total, every=every, write=self.lines.append, clock=lambda: self.now
        )

    def trained(self, step, at, speed=9000.0, left=75.0):
        """A loop ends at a step and a time; returns the lines that it prints."""
        self.now, before = at, len(self.lines)
        self.progress.trained(step, {"loss": 0.25}, examples_per_second=speed, seconds_left=left)
        return self.lines[before:]


def test_training_line():
    assert Screen().trained(100, at=0) == [
        "train     100/1000 | loss 0.2500 | 9,000 examples/s | 1 min 15 s left"
    ]


def test_first_loop_has_no_speed_yet():
    assert Screen().trained(100, at=0, speed=None, left=None) == [
        "train     100/1000 | loss 0.2500"
    ]


def test_last_step_has_no_time_left():
    line = "train    1000/1000 | loss 0.2500 | 9,000 examples/s"
    assert Screen().trained(1000, at=0, left=0.0) == [line]
    assert Screen().trained(1000, at=0, left=3.0) == [line]


def test_a_line_is_printed_every_few_seconds_and_at_the_last_step():
    screen = Screen(every=5.0)
    printed = [
        bool(screen.trained(step, at))
        for step, at in [
            (1, 100),
            (2, 101),
            (3, 104.9),
            (4, 105),
            (5, 109.9),
            (6, 110),
            (1000, 111),
        ]
    ]
    assert printed == [True, False, False, True, False, True, True]


def test_every_evaluation_has_a_line_and_delays_no_line_of_training():
    screen = Screen()
    screen.trained(1, at=100)
    screen.now = 104
    screen.progress.evaluated(1, {"loss": 0.5, "examples": 10000})
    screen.progress.evaluated(1, {"loss": 0.5, "examples": 10000})
    assert screen.lines[1:] == ["eval        1/1000 | loss 0.5000 | examples 10,000"] * 2
    assert screen.trained(2, at=105)


def test_other_lines_are_printed_as_they_are():
    screen = Screen()
    screen.progress.print_line("Resumed.")
    assert screen.lines == ["Resumed."]


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


def test_line_has_the_epoch_if_the_data_has_a_length():
    lines = []
    lines_of = progress.Progress(total=1000, steps_per_epoch=937.5, write=lines.append)
    lines_of.trained(100, {"loss": 0.25}, examples_per_second=None, seconds_left=None)
    assert lines == ["train     100/1000 | epoch 0.11 | loss 0.2500"]


@pytest.mark.parametrize(
    ("share", "end"),
    [(None, ""), (0.0, ""), (0.05, ""), (0.051, " | waited 5% for input"),
     (0.5, " | waited 50% for input"), (1.0, " | waited 100% for input")],
)  # fmt: skip
def test_line_has_the_share_of_waiting_for_input_above_5_percent(share, end):
    lines = []
    progress.Progress(total=1000, write=lines.append).trained(
        100, {"loss": 0.25}, examples_per_second=9.0, seconds_left=None, input_wait=share
    )
    assert lines == [f"train     100/1000 | loss 0.2500 | 9 examples/s{end}"]
