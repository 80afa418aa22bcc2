"""The table of modes: its names, its functions, and that it does not import TensorFlow."""

import inspect

import pytest

from ctl import modes
from ctl.configs import flags
from tests import child


def test_the_table_has_the_names_that_the_command_line_accepts():
    assert list(modes.MODES) == list(flags.MODES)


@pytest.mark.parametrize("mode", [*modes.MODES.values(), modes.SERVE], ids=lambda m: m.function)
def test_each_row_names_a_function_of_arguments(mode):
    (parameter,) = inspect.signature(mode.load()).parameters.values()
    assert parameter.annotation is modes.Arguments


def test_modes_that_report_mistakes_early_are_loaded_without_tensorflow():
    code = (
        "import sys; from ctl.modes import MODES\n"
        "MODES['devices'].load(), MODES['aot_compile'].load()\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    process = child.run(["-c", code])
    assert (process.returncode, process.stderr) == (0, "")
