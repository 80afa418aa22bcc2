"""The table of modes: its names, its functions, and that it does not import TensorFlow."""

import inspect

import pytest

from ctl import modes
from ctl.configs.modes import MODES, SERVE


@pytest.mark.parametrize("mode", [*MODES.values(), SERVE], ids=lambda m: m.function)
def test_each_row_names_a_function_of_arguments(mode):
    (parameter,) = inspect.signature(mode.load()).parameters.values()
    assert parameter.annotation is modes.Arguments
