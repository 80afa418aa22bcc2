"""A fault at every point of a run: calls on its files, signals, requests to a store, damaged files.

The runs are in one process each, of tests/support/faults. The slow tests try some points, the long ones
most of them.
"""

import shutil
import sys

import pytest

from benchmarks import faults

# The loop of a module -> the strides of its slow and of its long test.
LOOPS = {
    "io_faults --loop=names": (1, None),
    "io_faults --loop=calls": (47, 3),
    "io_faults --loop=signals": (67, 7),
    "stores": (29, 2),
    "damage": (13, 2),
}


def run(loop, stride, offset):
    """The tries that were not survived, and the number of tries."""
    if "io_faults" in loop and not (sys.platform.startswith("linux") and shutil.which("cc")):
        pytest.skip("calls can only fail on Linux with a C compiler: install cc")
    result = faults.run(loop, stride, offset)
    return [each for each in result["each"] if each["fault"]], result["tries"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loop", LOOPS)
def test_run_survives_a_fault_at_some_points(loop):
    failed, tries = run(loop, LOOPS[loop][0], 0)
    assert not failed and tries > 5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("loop", [loop for loop, (_, stride) in LOOPS.items() if stride])
def test_run_survives_a_fault_at_most_points(loop):
    failed, tries = run(loop, LOOPS[loop][1], 1)
    assert not failed and tries > 50
