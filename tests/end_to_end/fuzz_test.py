"""Whatever is given, at random: it is taken for what it says, or refused in one line.

CTL_FUZZ_SEED=1 python3 -m uv run pytest tests/end_to_end/fuzz_test.py -m ""    # other cases

What fails tells its kind, seed and case:
`python -m tests.end_to_end.fuzz KIND SEED CASE 1` tries it again.
"""

import json
import os
import pathlib
import subprocess

import pytest

from tests import child
from tests.end_to_end import fuzz

SEED = os.environ.get("CTL_FUZZ_SEED", "0")
LIGHT = {"command_line": 500, "config_file": 500, "flags": 400, "tf_config": 600, "workdir": 400}
HEAVY = {"idx": 600, "tfrecords": 300}


def outcomes(kind: str, count: int, folder: pathlib.Path, *, timeout: float) -> dict[str, int]:
    """How often what was given was taken and refused, by a process that tries `count` cases."""
    arguments = ["-m", "tests.end_to_end.fuzz", kind, SEED, "0", str(count)]
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        process = child.run(arguments, cwd=folder, timeout=timeout, **quiet)
    except subprocess.TimeoutExpired:
        case = (folder / "case").read_text()
        pytest.fail(f"{kind} {SEED} {case}: not done after {timeout:g} s, maybe it hangs")
    case = (folder / "case").read_text()
    assert process.returncode == 0, f"{kind} {SEED} {case}: {process.stderr[-3000:]}"
    found = json.loads(process.stdout.splitlines()[-1])
    wrong = "\n\n".join(found["wrong"][:5])
    assert not wrong, f"seed {SEED}, {len(found['wrong'])} of {count} are wrong:\n{wrong}"
    return found["counts"]


def test_there_are_thousands_of_cases_of_every_kind() -> None:
    assert {*LIGHT} == {*fuzz.LIGHT}
    assert {*HEAVY, "whole_run"} == {*fuzz.HEAVY}
    assert sum(LIGHT.values()) > 2_000


@pytest.mark.parametrize("kind", LIGHT)
def test_what_is_given_is_taken_or_refused_in_one_line(kind: str, tmp_path: pathlib.Path) -> None:
    counts = outcomes(kind, LIGHT[kind], tmp_path, timeout=60)
    assert counts[fuzz.REFUSED] > LIGHT[kind] / 4  # else it changes too little to find anything
    assert counts[fuzz.TAKEN] >= LIGHT[kind] / 60  # and else too much


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEAVY)
def test_data_is_read_as_it_is_or_refused_in_one_line(kind: str, tmp_path: pathlib.Path) -> None:
    counts = outcomes(kind, HEAVY[kind], tmp_path, timeout=120)
    assert counts[fuzz.REFUSED] > HEAVY[kind] / 4
    assert counts[fuzz.TAKEN] > HEAVY[kind] / 60


@pytest.mark.slow
def test_a_whole_run_counts_everything_or_is_refused_with_nothing_written(
    tmp_path: pathlib.Path,
) -> None:
    counts = outcomes("whole_run", 50, tmp_path, timeout=240)
    assert counts[fuzz.REFUSED] >= 10
    assert counts[fuzz.TAKEN] >= 10


PLANTED = """\
import sys
from ctl import checks
from tests.end_to_end import fuzz

check = checks.check_values

def breaks(values):
    if any(isinstance(value, int | float) and value < -1 for value in values.values()):
        raise TypeError("less than anything may be")
    check(values)

checks.check_values = breaks if sys.argv[1] == "raises" else lambda values: None
fuzz.attempts("command_line", "0", 1_000, 500)
"""


@pytest.mark.slow
def test_a_bug_is_found(tmp_path: pathlib.Path) -> None:
    for bug in ("raises", "checks nothing"):
        folder = tmp_path / bug.replace(" ", "_")
        folder.mkdir()
        process = child.run(["-c", PLANTED, bug], cwd=folder, timeout=120)
        assert json.loads(process.stdout.splitlines()[-1])["wrong"], bug
