"""A fault at every point of a run: calls on its files, signals, requests to a store, damaged files.

The runs are in one process each, of tests/support/faults. The slow tests try some points, the long ones
most of them.
"""

import json
import shutil
import sys

import pytest

from tests.support import child

# The loop of a module -> the strides of its slow and of its long test.
LOOPS = {
    "io_faults --loop=names": (1, None),
    "io_faults --loop=calls": (31, 3),
    "io_faults --loop=signals": (67, 7),
    "stores": (17, 2),
    "damage": (13, 2),
}


def run(loop, stride, offset, folder):
    """The tries that were not survived, and the number of tries."""
    module, *options = loop.split()
    if module == "io_faults" and not (sys.platform.startswith("linux") and shutil.which("cc")):
        pytest.skip("calls can only fail on Linux with a C compiler: install cc")
    path = folder / "result.json"
    arguments = ["-m", f"tests.support.faults.{module}", *options, f"--json={path}"]
    printed = child.run(
        [*arguments, f"--stride={stride}", f"--offset={offset}"], timeout=7200, fresh=True
    )
    assert printed.returncode == 0, printed.stderr[-2000:]
    result = json.loads(path.read_text())
    return [each for each in result["each"] if each["fault"]], result["tries"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loop", LOOPS)
def test_run_survives_a_fault_at_some_points(loop, tmp_path):
    failed, tries = run(loop, LOOPS[loop][0], 0, tmp_path)
    assert not failed and tries > 5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("loop", [loop for loop, (_, stride) in LOOPS.items() if stride])
def test_run_survives_a_fault_at_most_points(loop, tmp_path):
    failed, tries = run(loop, LOOPS[loop][1], 1, tmp_path)
    assert not failed and tries > 50
