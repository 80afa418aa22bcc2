"""The table of modes: its names, its functions, and that it does not import TensorFlow."""

import inspect

import pytest

from ctl import modes
from ctl.configs.modes import MODES, SERVE
from tests import child


@pytest.mark.parametrize("mode", [*MODES.values(), SERVE], ids=lambda m: m.function)
def test_each_row_names_a_function_of_arguments(mode):
    (parameter,) = inspect.signature(mode.load()).parameters.values()
    assert parameter.annotation is modes.Arguments


def test_modes_that_report_mistakes_early_are_loaded_without_tensorflow():
    code = (
        "import sys; from ctl.configs.modes import MODES\n"
        "MODES['devices'].load(), MODES['aot_compile'].load()\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    process = child.run(["-c", code])
    assert (process.returncode, process.stderr) == (0, "")
