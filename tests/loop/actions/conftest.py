"""A controller for actions that are called by hand."""

import types

import pytest

from ctl.hardware.collectives import ProcessGroup


class RecordingReporter:
    """Keeps what a `Reporter` would print and record."""

    def __init__(self):
        self.lines, self.events = [], []

    def print_line(self, line):
        self.lines.append(line)

    def record(self, event, step, **fields):
        self.events.append({"event": event, "step": step, **fields})


@pytest.fixture
def fake_controller():
    """What actions use of a controller; set `step` and the others as needed."""
    return types.SimpleNamespace(
        step=0, trainer=None, evaluator=None, is_chief=True, processes=ProcessGroup(),
        reporter=RecordingReporter(), workdir=None, evaluation=None, evaluated_step=None,
        checkpoints=types.SimpleNamespace(has_own_folder=False),
    )  # fmt: skip
