"""The comparison of evaluations."""

import pytest

from benchmarks import evaluation
from tests.support import child


@pytest.mark.slow
@pytest.mark.long
def test_table_has_all_programs():
    flags = "--rows 500 --processes 1 --windows 1 --seconds 0.01"
    result = child.run(["-m", "benchmarks.evaluation", *flags.split()])
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ")[0] for line in result.stdout.splitlines()]
    assert {f"| {name}" for name in evaluation.PREPARE} <= set(rows)
